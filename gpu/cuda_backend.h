#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>

#include "backend/backend.h"
#include "gpu/cuda_backend_api.h"
#include "gpu/cuda_ops.h"
#include "gpu/cuda_queue.h"
#include "gpu/device_buffer.h"
#include "gpu/device_memory_meter.h"
#include "gpu/driver_api.h"
#include "gpu/nvtx_trace.h"
#include "gpu/pinned_memory.h"

namespace orlop {

// One NVIDIA GPU. info() counts in this way: free_bytes is what the backend may use in all (the
// budget, or what was free before its context was made), overhead_bytes the context and the
// libraries, workspace_bytes what the backend allocates for matmuls and reductions; an arena of
// free_bytes - overhead_bytes - workspace_bytes fits. Attention workspace lies in the arena.
class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(const CudaBackendOptions& options);
  CudaBackend(const CudaBackend&) = delete;
  CudaBackend& operator=(const CudaBackend&) = delete;
  ~CudaBackend() override;

  DeviceInfo info() const override { return info_; }
  Queue& queue(QueueKind kind) override { return cuda_queue(kind); }
  std::unique_ptr<Event> make_event() override;
  Ops& ops() override { return *ops_; }
  void* allocate_arena(size_t bytes) override;
  void register_host_memory(void* address, size_t bytes) override;
  void synchronize() override;

  CudaQueue& cuda_queue(QueueKind kind) { return *queues_[static_cast<size_t>(kind)]; }
  CudaOps& cuda_ops() { return *ops_; }
  int device() const { return device_; }
  // Free now, as nvidia-smi shows it.
  size_t free_bytes_now() const;

 private:
  void make_queues(const CudaBackendOptions& options);
  void measure(const CudaBackendOptions& options, size_t free_before);
  void warm_up();

  int device_;
  DeviceInfo info_;
  std::unique_ptr<DeviceMemoryMeter> meter_;
  // Made in this order with the device current, destroyed in the reverse order.
  std::unique_ptr<DriverApi> driver_;
  std::unique_ptr<PinnedMemory> pinned_;
  std::unique_ptr<DeviceClock> clock_;
  std::array<std::unique_ptr<CudaQueue>, kQueueKinds> queues_;
  std::unique_ptr<CudaOps> ops_;
  DeviceBuffer arena_;
};

}  // namespace orlop
