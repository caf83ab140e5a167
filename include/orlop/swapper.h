#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "orlop/error.h"
#include "orlop/export.h"

namespace orlop {

struct AsyncFileOptions {
  size_t block_bytes = size_t{1} << 20;  // of one request; a multiple of 4096
  unsigned queue_depth = 128;            // requests in flight
  bool direct = true;                    // O_DIRECT where the file system takes it
  std::string engine = "auto";           // "auto", "io_uring" or "threads"
};

// Reads and writes whole buffers of any length and alignment from and to files, deep in the queue
// of the drive. The aligned part goes past the page cache; what is left at the end, and buffers or
// offsets that direct I/O does not take, go through it. A write makes the file as long as offset +
// bytes and never shortens it; nothing but the buffer's bytes is written.
//
// The verbs are those of the aio_handle of DeepSpeed. Buffers of async_ calls must stay until
// wait() or the destructor. One object is used by one thread at a time. Errors are Error(kIo)
// naming operation, path, offset and numbers, or Error(kUsage).
class ORLOP_EXPORT AsyncFile {
 public:
  explicit AsyncFile(const AsyncFileOptions& options = {});
  // Ends what is in flight; an error that nobody waited for is logged.
  ~AsyncFile();
  AsyncFile(const AsyncFile&) = delete;
  AsyncFile& operator=(const AsyncFile&) = delete;

  // Moves `bytes` between `buffer` and `path` from `file_offset` (bytes) on. With `async` it
  // returns 0 at once, otherwise 1 when the transfer is complete. With `validate` the file is read
  // once more, plainly, and compared with the buffer (of an async call: in wait()).
  size_t pread(void* buffer, size_t bytes, const std::string& path, bool validate, bool async,
               uint64_t file_offset = 0);
  size_t pwrite(const void* buffer, size_t bytes, const std::string& path, bool validate,
                bool async, uint64_t file_offset = 0);

  size_t read(void* buffer, size_t bytes, const std::string& path, bool validate = false,
              uint64_t file_offset = 0) {
    return pread(buffer, bytes, path, validate, false, file_offset);
  }
  size_t write(const void* buffer, size_t bytes, const std::string& path, bool validate = false,
               uint64_t file_offset = 0) {
    return pwrite(buffer, bytes, path, validate, false, file_offset);
  }
  size_t sync_pread(void* buffer, size_t bytes, const std::string& path, uint64_t file_offset = 0) {
    return pread(buffer, bytes, path, false, false, file_offset);
  }
  size_t sync_pwrite(const void* buffer, size_t bytes, const std::string& path,
                     uint64_t file_offset = 0) {
    return pwrite(buffer, bytes, path, false, false, file_offset);
  }
  size_t async_pread(void* buffer, size_t bytes, const std::string& path,
                     uint64_t file_offset = 0) {
    return pread(buffer, bytes, path, false, true, file_offset);
  }
  size_t async_pwrite(const void* buffer, size_t bytes, const std::string& path,
                      uint64_t file_offset = 0) {
    return pwrite(buffer, bytes, path, false, true, file_offset);
  }
  // The same on a file that the caller has opened and keeps open; its own flags hold.
  size_t async_pread(void* buffer, size_t bytes, int fd, uint64_t file_offset = 0);
  size_t async_pwrite(const void* buffer, size_t bytes, int fd, uint64_t file_offset = 0);

  // Waits for all async calls since the last wait() and returns how many there were. Throws the
  // first error after all of them have ended.
  size_t wait();

  // Page-aligned zeroed memory, locked and known to the kernel where the limits allow it, so that
  // requests on it are cheaper. Freed by free_cpu_locked_tensor or with the object.
  void* new_cpu_locked_tensor(size_t bytes);
  void free_cpu_locked_tensor(void* memory);

  size_t block_bytes() const;
  unsigned queue_depth() const;
  // Of addresses, offsets and lengths that go past the page cache on every drive, bytes.
  size_t alignment() const;
  // "io_uring" or "threads".
  std::string backend() const;
  // Why it is not io_uring; empty when it is or when threads were asked for.
  std::string backend_reason() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace orlop
