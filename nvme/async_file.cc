#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "base/bytes.h"
#include "base/check.h"
#include "base/completion.h"
#include "base/log.h"
#include "base/unique_fd.h"
#include "nvme/direct_io.h"
#include "nvme/io_backend.h"
#include "nvme/io_queue.h"
#include "orlop/swapper.h"

namespace orlop {
namespace {

using nvme::IoOp;

// Page size as well, so that a direct and a buffered part never share a page.
constexpr size_t kAlignment = 4096;

// One call. The files stay open until its last part has ended.
struct FileOperation {
  IoOp op = IoOp::kRead;
  std::byte* buffer = nullptr;
  size_t bytes = 0;
  uint64_t offset = 0;
  std::string path;
  bool validate = false;
  UniqueFd direct;    // empty when the file system has no direct I/O
  UniqueFd buffered;  // empty when the caller's own file is used

  std::mutex mutex;
  int parts_left = 0;
  std::exception_ptr error;
  Completion<> ended;

  std::string describe() const {
    return fmt::format("{} of {} bytes at offset {}", op == IoOp::kRead ? "read" : "write", bytes,
                       offset);
  }
  void end_part(const std::exception_ptr& part_error) {
    std::unique_lock lock(mutex);
    if (part_error && !error) error = part_error;
    if (--parts_left > 0) return;
    lock.unlock();
    error ? ended.set_error(error) : ended.set_value();
  }
};

using OperationPtr = std::shared_ptr<FileOperation>;

UniqueFd open_file(IoOp op, const std::string& path) {
  const int flags = op == IoOp::kRead ? O_RDONLY : O_RDWR | O_CREAT;
  UniqueFd fd(::open(path.c_str(), flags | O_CLOEXEC, 0644));
  check(static_cast<bool>(fd), ErrorCode::kIo, "cannot open {} for {}: {}", path,
        op == IoOp::kRead ? "reading" : "writing", errno_text(errno));
  return fd;
}

void compare_with_file(const FileOperation& operation) {
  const UniqueFd fd = open_file(IoOp::kRead, operation.path);
  std::vector<std::byte> piece(std::min(operation.bytes, kMiB));
  for (size_t done = 0; done < operation.bytes; done += piece.size()) {
    const size_t bytes = std::min(piece.size(), operation.bytes - done);
    nvme::read_fully(fd.get(), piece.data(), bytes, operation.offset + done, operation.path);
    const auto [found, expected] = std::mismatch(
        piece.begin(), piece.begin() + static_cast<ptrdiff_t>(bytes), operation.buffer + done);
    if (expected == operation.buffer + done + bytes) continue;
    fail(ErrorCode::kIo, "{} of {}: byte {} of the file is {:#04x}, the buffer has {:#04x}",
         operation.describe(), operation.path,
         operation.offset + done + static_cast<size_t>(found - piece.begin()),
         std::to_integer<int>(*found), std::to_integer<int>(*expected));
  }
}

}  // namespace

class AsyncFile::Impl {
 public:
  explicit Impl(const AsyncFileOptions& options) : direct_(options.direct) {
    nvme::BackendChoice choice =
        nvme::make_io_backend(nvme::parse_io_engine(options.engine), options.queue_depth);
    reason_ = std::move(choice.reason);
    nvme::IoQueueOptions queue;
    queue.block_bytes = options.block_bytes;
    queue.depth = options.queue_depth;
    queue_ = std::make_unique<nvme::IoQueue>(std::move(choice.backend), queue);
  }

  ~Impl() {
    for (const OperationPtr& operation : pending_) {
      if (operation->ended.wait_error()) {
        log_warning("{} of {} failed and nobody waited for it", operation->describe(),
                    operation->path);
      }
    }
    queue_.reset();
    for (const auto& [memory, bytes] : locked_) ::munmap(memory, bytes);
  }

  size_t run(OperationPtr operation, bool async) {
    start(operation);
    if (async) {
      pending_.push_back(std::move(operation));
      return 0;
    }
    operation->ended.wait();
    if (operation->validate) compare_with_file(*operation);
    return 1;
  }

  OperationPtr open(IoOp op, void* buffer, size_t bytes, const std::string& path, uint64_t offset) {
    auto operation = std::make_shared<FileOperation>();
    operation->op = op;
    operation->buffer = static_cast<std::byte*>(buffer);
    operation->bytes = bytes;
    operation->offset = offset;
    operation->path = nvme::absolute_path(path);
    operation->buffered = open_file(op, operation->path);
    return operation;
  }

  size_t run_on_fd(IoOp op, void* buffer, size_t bytes, int fd, uint64_t offset) {
    auto operation = std::make_shared<FileOperation>();
    operation->op = op;
    operation->buffer = static_cast<std::byte*>(buffer);
    operation->bytes = bytes;
    operation->offset = offset;
    operation->path = fmt::format("file descriptor {}", fd);
    const int flags = ::fcntl(fd, F_GETFL);
    check(flags >= 0, ErrorCode::kUsage, "file descriptor {}: {}", fd, errno_text(errno));
    operation->parts_left = 1;
    submit(operation, fd, 0, bytes, (flags & O_DIRECT) != 0 ? kAlignment : 1);
    pending_.push_back(std::move(operation));
    return 0;
  }

  size_t wait() {
    std::vector<OperationPtr> operations;
    operations.swap(pending_);
    for (const OperationPtr& operation : operations) {
      static_cast<void>(operation->ended.wait_error());
    }
    std::exception_ptr first_error;
    for (const OperationPtr& operation : operations) {
      std::exception_ptr error = operation->ended.wait_error();
      if (!error && operation->validate) {
        try {
          compare_with_file(*operation);
        } catch (const Error&) {
          error = std::current_exception();
        }
      }
      if (error && !first_error) first_error = error;
    }
    if (first_error) std::rethrow_exception(first_error);
    return operations.size();
  }

  void* new_locked(size_t bytes) {
    const size_t mapped = align_up(std::max<size_t>(bytes, 1), kAlignment);
    void* memory =
        ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(memory != MAP_FAILED, ErrorCode::kOutOfMemory, "cannot map {} of locked memory: {}",
          format_bytes(mapped), errno_text(errno));
    ::madvise(memory, mapped, MADV_HUGEPAGE);  // fewer segments per request; a hint
    if (::mlock(memory, mapped) != 0) {
      log_info("{} stay unlocked: {}; see ulimit -l", format_bytes(mapped), errno_text(errno));
    }
    locked_.emplace(memory, mapped);
    const std::span<std::byte> region(static_cast<std::byte*>(memory), mapped);
    queue_->with_backend(
        [&](nvme::IoBackend& backend) { backend.register_buffer(region, kAlignment); });
    return memory;
  }

  void free_locked(void* memory) {
    const auto found = locked_.find(memory);
    check(found != locked_.end(), ErrorCode::kUsage,
          "free_cpu_locked_tensor: {} is not from new_cpu_locked_tensor", memory);
    const std::span<std::byte> region(static_cast<std::byte*>(memory), found->second);
    for (const OperationPtr& operation : pending_) {
      check(operation->ended.done() || operation->buffer < region.data() ||
                operation->buffer >= region.data() + region.size(),
            ErrorCode::kUsage,
            "free_cpu_locked_tensor: {} of {} still uses the memory; call wait()",
            operation->describe(), operation->path);
    }
    queue_->with_backend([&](nvme::IoBackend& backend) { backend.unregister_buffer(region); });
    ::munmap(memory, found->second);
    locked_.erase(found);
  }

  const nvme::IoQueue& queue() const { return *queue_; }
  const std::string& reason() const { return reason_; }

 private:
  // Cuts the aligned part off for direct I/O and starts both parts.
  void start(const OperationPtr& operation) {
    size_t direct_bytes = operation->bytes / kAlignment * kAlignment;
    const bool aligned = operation->offset % kAlignment == 0 &&
                         reinterpret_cast<uintptr_t>(operation->buffer) % kAlignment == 0;
    if (!direct_ || !aligned) direct_bytes = 0;
    if (direct_bytes > 0) {
      operation->direct = open_file(operation->op, operation->path);
      const nvme::DirectIo io = nvme::enable_direct_io(operation->direct.get());
      if (!io.direct || kAlignment % io.offset_alignment != 0) {
        direct_bytes = 0;
        say_buffered(operation->path, io.why_not);
      }
    }
    const size_t rest = operation->bytes - direct_bytes;
    const bool two_parts = direct_bytes > 0 && rest > 0;
    operation->parts_left = two_parts ? 2 : 1;
    if (direct_bytes > 0) submit(operation, operation->direct.get(), 0, direct_bytes, kAlignment);
    if (rest > 0 || direct_bytes == 0) {
      submit(operation, operation->buffered.get(), direct_bytes, rest, 1);
    }
  }

  void submit(const OperationPtr& operation, int fd, size_t begin, size_t bytes, size_t alignment) {
    nvme::Transfer transfer;
    transfer.op = operation->op;
    transfer.fd = fd;
    transfer.offset = operation->offset + begin;
    transfer.data = {operation->buffer + begin, bytes};
    transfer.alignment = alignment;
    transfer.operation = operation->describe();
    transfer.path = operation->path;
    transfer.done = [operation](const std::exception_ptr& error) { operation->end_part(error); };
    queue_->submit(std::move(transfer));
  }

  void say_buffered(const std::string& path, const std::string& why) {
    if (said_buffered_) return;
    said_buffered_ = true;
    log_info("{}: reads and writes go through the page cache: {}", path, why);
  }

  const bool direct_;
  bool said_buffered_ = false;
  std::string reason_;
  std::unique_ptr<nvme::IoQueue> queue_;
  std::vector<OperationPtr> pending_;
  std::map<void*, size_t> locked_;  // address and length
};

AsyncFile::AsyncFile(const AsyncFileOptions& options) : impl_(std::make_unique<Impl>(options)) {}

AsyncFile::~AsyncFile() = default;

size_t AsyncFile::pread(void* buffer, size_t bytes, const std::string& path, bool validate,
                        bool async, uint64_t file_offset) {
  OperationPtr operation = impl_->open(IoOp::kRead, buffer, bytes, path, file_offset);
  operation->validate = validate;
  return impl_->run(std::move(operation), async);
}

size_t AsyncFile::pwrite(const void* buffer, size_t bytes, const std::string& path, bool validate,
                         bool async, uint64_t file_offset) {
  OperationPtr operation =
      impl_->open(IoOp::kWrite, const_cast<void*>(buffer), bytes, path, file_offset);
  operation->validate = validate;
  return impl_->run(std::move(operation), async);
}

size_t AsyncFile::async_pread(void* buffer, size_t bytes, int fd, uint64_t file_offset) {
  return impl_->run_on_fd(IoOp::kRead, buffer, bytes, fd, file_offset);
}

size_t AsyncFile::async_pwrite(const void* buffer, size_t bytes, int fd, uint64_t file_offset) {
  return impl_->run_on_fd(IoOp::kWrite, const_cast<void*>(buffer), bytes, fd, file_offset);
}

size_t AsyncFile::wait() { return impl_->wait(); }

void* AsyncFile::new_cpu_locked_tensor(size_t bytes) { return impl_->new_locked(bytes); }

void AsyncFile::free_cpu_locked_tensor(void* memory) { impl_->free_locked(memory); }

size_t AsyncFile::block_bytes() const { return impl_->queue().options().block_bytes; }

unsigned AsyncFile::queue_depth() const { return impl_->queue().options().depth; }

size_t AsyncFile::alignment() const { return kAlignment; }

std::string AsyncFile::backend() const { return std::string(impl_->queue().backend_name()); }

std::string AsyncFile::backend_reason() const { return impl_->reason(); }

}  // namespace orlop
