#include "host/host_backend.h"

#include <unistd.h>

#include <array>
#include <cstdint>

#include "base/bytes.h"
#include "base/check.h"
#include "host/host_ops.h"
#include "host/host_queue.h"
#include "host/mapped_memory.h"

namespace orlop {
namespace {

using host::HostEvent;
using host::HostQueue;
using host::MappedMemory;
using host::Progress;

class HostBackend final : public Backend {
 public:
  explicit HostBackend(const HostBackendOptions& options)
      : device_bytes_(options.device_bytes), workspace_(workspace_within(options)) {
    ops_ = host::make_host_ops({.reference = options.reference_ops,
                                .threads = options.threads,
                                .workspace = {workspace_.data(), workspace_.bytes()}});
    const std::array<const char*, kQueueKinds> names = {"compute", "upload", "offload", "comm",
                                                        "save"};
    const auto group = std::make_shared<host::QueueGroup>();
    for (size_t kind = 0; kind < names.size(); ++kind) {
      queues_[kind] = std::make_unique<HostQueue>(
          host::HostQueueOptions{names[kind], options.threads, options.tracer, group});
    }
  }

  // Queues may wait for each other: all are told to stop before the first is joined.
  ~HostBackend() override {
    for (auto& queue : queues_) {
      if (queue) queue->stop();
    }
  }

  DeviceInfo info() const override {
    return {.name = "host",
            .total_bytes = device_bytes_,
            .free_bytes = device_bytes_ - workspace_.bytes() - arena_.bytes(),
            .overhead_bytes = 0,
            .workspace_bytes = workspace_.bytes(),
            .is_host = true};
  }

  Queue& queue(QueueKind kind) override { return *queues_[static_cast<size_t>(kind)]; }
  std::unique_ptr<Event> make_event() override { return std::make_unique<HostEvent>(); }
  Ops& ops() override { return *ops_; }

  void* allocate_arena(size_t bytes) override {
    check(arena_.bytes() == 0, ErrorCode::kUsage, "host device: the arena of {} is already taken",
          format_bytes(arena_.bytes()));
    const size_t available = device_bytes_ - workspace_.bytes();
    check(bytes <= available, ErrorCode::kDoesNotFit,
          "host device: an arena of {} bytes was asked for, {} are left of the budget of {} after "
          "the "
          "workspace of {}; raise the device budget by {} bytes",
          bytes, available, device_bytes_, workspace_.bytes(), bytes - available);
    arena_ = MappedMemory(bytes, "device arena");
    return arena_.data();
  }

  void register_host_memory(void* address, size_t bytes) override {
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    check(
        address != nullptr && reinterpret_cast<uintptr_t>(address) % page == 0, ErrorCode::kUsage,
        "host device: memory of {} bytes to register starts at {}, which is not a multiple of the "
        "page size {}",
        bytes, address, page);
  }

  void synchronize() override {
    Progress::Failure first;
    for (auto& queue : queues_) {
      const Progress::Failure failure = queue->drain();
      if (failure.error && (!first.error || failure.order < first.order)) first = failure;
    }
    if (first.error) std::rethrow_exception(first.error);
  }

 private:
  static MappedMemory workspace_within(const HostBackendOptions& options) {
    check(options.threads >= 1, ErrorCode::kUsage,
          "host device: threads is {}, it must be at least 1", options.threads);
    const size_t bytes = host::host_workspace_bytes(options.reference_ops, options.threads);
    check(bytes <= options.device_bytes, ErrorCode::kDoesNotFit,
          "host device: the budget of {} bytes is below the {} bytes of the matmul workspace; "
          "raise the "
          "device budget by {} bytes",
          options.device_bytes, bytes, bytes - options.device_bytes);
    return MappedMemory(bytes, "matmul workspace");
  }

  const size_t device_bytes_;
  MappedMemory workspace_;
  MappedMemory arena_;
  std::unique_ptr<Ops> ops_;
  std::array<std::unique_ptr<HostQueue>, kQueueKinds> queues_;
};

}  // namespace

std::unique_ptr<Backend> make_host_backend(const HostBackendOptions& options) {
  return std::make_unique<HostBackend>(options);
}

}  // namespace orlop
