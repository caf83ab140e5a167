#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace orlop::nvme {

enum class IoOp : uint8_t { kRead, kWrite };

// Largest request that a backend takes; IoQueue cuts longer transfers. Linux moves at most
// 0x7ffff000 bytes in one call, and a registered buffer holds at most 1 GiB.
inline constexpr size_t kMaxRequestBytes = size_t{1} << 30;

// One pread or pwrite. The memory belongs to the backend until the result with `token` is reaped.
struct IoRequest {
  IoOp op = IoOp::kRead;
  int fd = -1;
  uint64_t offset = 0;  // in the file, bytes
  std::byte* data = nullptr;
  size_t bytes = 0;
  uint64_t token = 0;  // comes back with the result; unique among the requests in flight
};

// What the system call returned: bytes moved, possibly fewer than asked, or a negative errno.
struct IoResult {
  uint64_t token = 0;
  int64_t result = 0;
};

// Issues raw requests and reports raw results; retries, rests of short transfers, order and errors
// are IoQueue's. One thread, the owner, calls everything but wake(). Nothing throws once it is
// made: a failing request is a negative result.
class IoBackend {
 public:
  virtual ~IoBackend() = default;

  virtual std::string_view name() const = 0;

  // Accepts requests from the front and returns how many; the rest may be offered again after
  // reap(). Accepted requests start at the latest inside the next reap().
  virtual size_t submit(std::span<const IoRequest> requests) = 0;

  // Moves finished results to the front of `results` and returns their number. With `wait` it
  // sleeps until there is one or wake() was called; it may also return 0 early.
  virtual size_t reap(std::span<IoResult> results, bool wait) = 0;

  // Ends a sleeping (or the next) reap(). Any thread.
  virtual void wake() noexcept = 0;

  // Registration makes requests cheaper and changes nothing else; where it is refused, requests
  // stay plain. No request in flight may use what is unregistered. A region is cut in pieces of at
  // most kMaxRequestBytes at multiples of `stride` (the slot) from its begin.
  virtual void register_file(int /*fd*/) {}
  virtual void unregister_file(int /*fd*/) {}
  virtual void register_buffer(std::span<std::byte> /*region*/, size_t /*stride*/) {}
  virtual void unregister_buffer(std::span<std::byte> /*region*/) {}
};

enum class IoEngine : uint8_t { kAuto, kUring, kThreads };

// "auto", "io_uring" or "threads". Throws Error(kUsage).
IoEngine parse_io_engine(std::string_view text);

struct BackendChoice {
  std::unique_ptr<IoBackend> backend;
  std::string reason;  // why kAuto did not take io_uring; empty when it did
};

// kAuto takes io_uring where it works and threads elsewhere, with one log line per process; kUring
// throws Error(kIo) naming the call, errno, likely cause and remedies. `depth` is the number of
// requests that will be in flight at most.
BackendChoice make_io_backend(IoEngine engine, unsigned depth);

// Wraps every backend that make_io_backend() makes from now on; null ends that. Not while one is
// being made. With it tests put faults below a whole engine.
using IoBackendDecorator =
    std::function<std::unique_ptr<IoBackend>(std::unique_ptr<IoBackend> backend)>;
void decorate_io_backends(IoBackendDecorator decorator);

// Likely cause and remedy of a refused io_uring call, for people. `disabled_sysctl` is the value of
// kernel.io_uring_disabled, or -1 when the kernel has no such switch.
std::string explain_uring_error(std::string_view call, int error, int disabled_sysctl);

}  // namespace orlop::nvme
