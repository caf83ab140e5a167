#include "nvme/uring_backend.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <fstream>
#include <thread>

#include "base/bytes.h"
#include "base/check.h"
#include "base/log.h"

namespace orlop::nvme {
namespace {

constexpr uint64_t kWakeToken = ~uint64_t{0};
constexpr unsigned kFileSlots = 64;
constexpr unsigned kBufferSlots = 1024;  // older kernels take no more
constexpr unsigned kProbeOps = 256;
constexpr size_t kProbeBytes = sizeof(io_uring_probe) + kProbeOps * sizeof(io_uring_probe_op);
constexpr auto kPause = std::chrono::microseconds(50);

int read_disabled_sysctl() {
  int value = -1;
  std::ifstream("/proc/sys/kernel/io_uring_disabled") >> value;
  return value;
}

[[noreturn]] void refuse(std::string_view call, int error) {
  fail(ErrorCode::kIo, "{}", explain_uring_error(call, error, read_disabled_sysctl()));
}

// Makes the ring; a kernel that does not know the flag gets a plain one.
void make_ring(io_uring* ring, unsigned entries) {
  io_uring_params params{};
  params.flags = IORING_SETUP_CLAMP | IORING_SETUP_COOP_TASKRUN;
  int result = io_uring_queue_init_params(entries, ring, &params);
  if (result == -EINVAL) {
    params = {};
    params.flags = IORING_SETUP_CLAMP;
    result = io_uring_queue_init_params(entries, ring, &params);
  }
  if (result < 0) refuse("io_uring_setup", -result);
}

}  // namespace

UringBackend::UringBackend(unsigned depth) {
  make_ring(&ring_, depth + 1);  // one more for the wake-up
  try {
    try_ring();
    wake_fd_.reset(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    check(static_cast<bool>(wake_fd_), ErrorCode::kIo, "eventfd failed: {}", errno_text(errno));
  } catch (...) {
    io_uring_queue_exit(&ring_);
    throw;
  }
  io_uring_ring_dontfork(&ring_);
  fd_of_slot_.assign(kFileSlots, -1);
  files_registered_ = io_uring_register_files(&ring_, fd_of_slot_.data(), kFileSlots) == 0;
  buffer_table_ = io_uring_register_buffers_sparse(&ring_, kBufferSlots) == 0;
  for (unsigned i = kBufferSlots; i > 0; --i) free_buffers_.push_back(i - 1);
}

UringBackend::~UringBackend() { io_uring_queue_exit(&ring_); }

// A profile may allow the set-up and forbid the rest, so one empty request goes through the ring.
void UringBackend::try_ring() {
  alignas(io_uring_probe) std::array<std::byte, kProbeBytes> memory{};
  auto* const probe = reinterpret_cast<io_uring_probe*>(memory.data());
  int result = io_uring_register_probe(&ring_, probe, kProbeOps);
  if (result < 0) refuse("io_uring_register", -result);
  for (const int op : {IORING_OP_READ, IORING_OP_WRITE_FIXED, IORING_OP_POLL_ADD}) {
    if (!io_uring_opcode_supported(probe, op)) refuse("io_uring_register", ENOSYS);
  }

  io_uring_prep_nop(io_uring_get_sqe(&ring_));
  do {
    result = io_uring_submit_and_wait(&ring_, 1);
  } while (result == -EINTR);
  if (result < 0) refuse("io_uring_enter", -result);
  io_uring_cqe* cqe = nullptr;
  while ((result = io_uring_wait_cqe(&ring_, &cqe)) == -EINTR) {
  }
  if (result < 0) refuse("io_uring_enter", -result);
  io_uring_cqe_seen(&ring_, cqe);
}

// One by one: the kernel merges neighbours that come in one call, up to what the drive takes in one
// request, and as they then end and come again together, the drive's queue would stay shallow.
size_t UringBackend::submit(std::span<const IoRequest> requests) {
  size_t accepted = 0;
  for (const IoRequest& request : requests) {
    if (broken_ != 0) {
      refused_.push_back({request.token, -broken_});
    } else {
      io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
      if (!sqe) break;
      prepare(sqe, request);
      enter(0);
    }
    ++accepted;
  }
  return accepted;
}

void UringBackend::prepare(io_uring_sqe* sqe, const IoRequest& request) const {
  const auto bytes = static_cast<unsigned>(request.bytes);
  const auto slot = std::find(fd_of_slot_.begin(), fd_of_slot_.end(), request.fd);
  const bool fixed_file = files_registered_ && slot != fd_of_slot_.end();
  const int fd = fixed_file ? static_cast<int>(slot - fd_of_slot_.begin()) : request.fd;
  if (const Buffer* buffer = find_buffer(request)) {
    const auto index = static_cast<int>(buffer->index);
    if (request.op == IoOp::kRead) {
      io_uring_prep_read_fixed(sqe, fd, request.data, bytes, request.offset, index);
    } else {
      io_uring_prep_write_fixed(sqe, fd, request.data, bytes, request.offset, index);
    }
  } else if (request.op == IoOp::kRead) {
    io_uring_prep_read(sqe, fd, request.data, bytes, request.offset);
  } else {
    io_uring_prep_write(sqe, fd, request.data, bytes, request.offset);
  }
  if (fixed_file) io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE);
  io_uring_sqe_set_data64(sqe, request.token);
}

const UringBackend::Buffer* UringBackend::find_buffer(const IoRequest& request) const {
  auto after = std::upper_bound(
      buffers_.begin(), buffers_.end(), request.data,
      [](const std::byte* data, const Buffer& buffer) { return data < buffer.begin; });
  if (after == buffers_.begin()) return nullptr;
  const Buffer& buffer = *--after;
  return request.data + request.bytes <= buffer.end ? &buffer : nullptr;
}

size_t UringBackend::reap(std::span<IoResult> results, bool wait) {
  const size_t refused = std::min(refused_.size(), results.size());
  std::copy_n(refused_.begin(), refused, results.begin());
  refused_.erase(refused_.begin(), refused_.begin() + static_cast<ptrdiff_t>(refused));

  wait = wait && refused == 0 && io_uring_cq_ready(&ring_) == 0;
  if (broken_ == 0) {
    if (wait) arm_wake();
    if (wait || io_uring_sq_ready(&ring_) > 0) enter(wait ? 1 : 0);
  } else if (wait) {
    std::this_thread::sleep_for(kPause);  // what is in flight still ends and shows in the ring
  }
  return refused + take_completions(results.subspan(refused));
}

// A signal, a full completion queue or a lack of memory leave the requests in the ring: the next
// call offers them again.
void UringBackend::enter(unsigned wait_for) {
  const int result = io_uring_submit_and_wait(&ring_, wait_for);
  if (result >= 0 || result == -EINTR) return;
  if (result == -EAGAIN || result == -EBUSY || result == -ENOMEM) {
    if (io_uring_cq_ready(&ring_) == 0) std::this_thread::sleep_for(kPause);
    return;
  }
  break_ring(-result);
}

// The ring refuses to be entered. Requests that it has not taken fail now; those in flight are
// waited for by looking at the shared memory alone.
void UringBackend::break_ring(int error) {
  broken_ = error;
  const unsigned waiting = io_uring_sq_ready(&ring_);
  for (unsigned i = ring_.sq.sqe_tail - waiting; i != ring_.sq.sqe_tail; ++i) {
    const uint64_t token = ring_.sq.sqes[i & *ring_.sq.kring_mask].user_data;
    if (token != kWakeToken) refused_.push_back({token, -error});
  }
}

size_t UringBackend::take_completions(std::span<IoResult> results) {
  size_t count = 0;
  while (count < results.size()) {
    io_uring_cqe* cqe = nullptr;
    if (broken_ == 0) {
      if (io_uring_peek_cqe(&ring_, &cqe) != 0) break;
    } else {
      unsigned head = 0;
      unsigned seen = 0;
      io_uring_for_each_cqe(&ring_, head, cqe) {
        ++seen;
        break;
      }
      if (seen == 0) break;
    }
    if (cqe->user_data == kWakeToken) {
      wake_armed_ = false;
      uint64_t ignored = 0;
      while (::read(wake_fd_.get(), &ignored, sizeof ignored) < 0 && errno == EINTR) {
      }
    } else {
      results[count++] = {cqe->user_data, cqe->res};
    }
    io_uring_cqe_seen(&ring_, cqe);
  }
  return count;
}

void UringBackend::arm_wake() {
  if (wake_armed_) return;
  io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
  if (!sqe) return;  // a full ring: its completions end the sleep as well
  io_uring_prep_poll_add(sqe, wake_fd_.get(), POLLIN);
  io_uring_sqe_set_data64(sqe, kWakeToken);
  wake_armed_ = true;
}

void UringBackend::wake() noexcept {
  const uint64_t one = 1;
  while (::write(wake_fd_.get(), &one, sizeof one) < 0 && errno == EINTR) {
  }
}

void UringBackend::register_file(int fd) {
  if (!files_registered_) return;
  const auto slot = std::find(fd_of_slot_.begin(), fd_of_slot_.end(), -1);
  if (slot == fd_of_slot_.end()) return;
  const auto index = static_cast<unsigned>(slot - fd_of_slot_.begin());
  if (io_uring_register_files_update(&ring_, index, &fd, 1) == 1) *slot = fd;
}

void UringBackend::unregister_file(int fd) {
  const auto slot = std::find(fd_of_slot_.begin(), fd_of_slot_.end(), fd);
  if (slot == fd_of_slot_.end()) return;
  int none = -1;
  const auto index = static_cast<unsigned>(slot - fd_of_slot_.begin());
  io_uring_register_files_update(&ring_, index, &none, 1);
  *slot = -1;
}

void UringBackend::register_buffer(std::span<std::byte> region, size_t stride) {
  if (!buffer_table_) {
    log_info("io_uring: buffers stay unregistered, which costs some CPU: Linux 5.19 is needed");
    return;
  }
  check(stride > 0, ErrorCode::kInternal, "register_buffer: stride is 0");
  const size_t piece_bytes = std::max(kMaxRequestBytes / stride * stride, stride);
  for (size_t done = 0; done < region.size();) {
    const size_t bytes = std::min({piece_bytes, region.size() - done});
    if (bytes > kMaxRequestBytes) return;  // a slot above the kernel's limit: plain requests
    if (!register_piece(region.data() + done, bytes)) return;
    done += bytes;
  }
}

bool UringBackend::register_piece(std::byte* begin, size_t bytes) {
  int error = ENOSPC;
  if (!free_buffers_.empty()) {
    const iovec piece{begin, bytes};
    const __u64 no_tag = 0;
    const int result =
        io_uring_register_buffers_update_tag(&ring_, free_buffers_.back(), &piece, &no_tag, 1);
    error = result == 1 ? 0 : -result;
  }
  if (error != 0) {
    log_info("io_uring: {} stay unregistered, which costs some CPU: {}", format_bytes(bytes),
             explain_uring_error("io_uring_register", error, 0));
    return false;
  }
  const Buffer buffer{begin, begin + bytes, free_buffers_.back()};
  free_buffers_.pop_back();
  const auto place =
      std::upper_bound(buffers_.begin(), buffers_.end(), buffer,
                       [](const Buffer& a, const Buffer& b) { return a.begin < b.begin; });
  buffers_.insert(place, buffer);
  return true;
}

void UringBackend::unregister_buffer(std::span<std::byte> region) {
  std::erase_if(buffers_, [&](const Buffer& buffer) {
    if (buffer.begin < region.data() || buffer.end > region.data() + region.size()) return false;
    const iovec none{nullptr, 0};
    const __u64 no_tag = 0;
    io_uring_register_buffers_update_tag(&ring_, buffer.index, &none, &no_tag, 1);
    free_buffers_.push_back(buffer.index);
    return true;
  });
}

}  // namespace orlop::nvme
