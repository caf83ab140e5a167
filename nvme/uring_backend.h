#pragma once

#include <liburing.h>

#include <vector>

#include "base/unique_fd.h"
#include "nvme/io_backend.h"

namespace orlop::nvme {

// io_uring with registered files and buffers. One system call submits and waits.
class UringBackend final : public IoBackend {
 public:
  // Throws Error(kIo) when the kernel refuses the ring or lacks what is used of it (Linux 5.6).
  explicit UringBackend(unsigned depth);
  ~UringBackend() override;
  UringBackend(const UringBackend&) = delete;
  UringBackend& operator=(const UringBackend&) = delete;

  std::string_view name() const override { return "io_uring"; }
  size_t submit(std::span<const IoRequest> requests) override;
  size_t reap(std::span<IoResult> results, bool wait) override;
  void wake() noexcept override;

  void register_file(int fd) override;
  void unregister_file(int fd) override;
  void register_buffer(std::span<std::byte> region, size_t stride) override;
  void unregister_buffer(std::span<std::byte> region) override;

  // How many pieces of memory the kernel has accepted.
  size_t registered_buffers() const { return buffers_.size(); }

 private:
  struct Buffer {
    const std::byte* begin;
    const std::byte* end;
    unsigned index;  // in the ring's table
  };

  void try_ring();
  void prepare(io_uring_sqe* sqe, const IoRequest& request) const;
  const Buffer* find_buffer(const IoRequest& request) const;
  bool register_piece(std::byte* begin, size_t bytes);
  void arm_wake();
  void enter(unsigned wait_for);
  void break_ring(int error);
  size_t take_completions(std::span<IoResult> results);

  io_uring ring_{};
  UniqueFd wake_fd_;
  bool wake_armed_ = false;
  int broken_ = 0;                 // errno that ended the ring; 0 while it works
  std::vector<IoResult> refused_;  // results of requests that never reached a broken ring
  bool files_registered_ = false;
  std::vector<int> fd_of_slot_;  // the ring's file table; -1 is free
  bool buffer_table_ = false;
  std::vector<Buffer> buffers_;         // by begin
  std::vector<unsigned> free_buffers_;  // free entries of the ring's table
};

}  // namespace orlop::nvme
