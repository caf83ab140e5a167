#pragma once

#include <cstddef>
#include <string>

#include "backend/backend.h"
#include "gpu/cuda_event.h"
#include "gpu/cuda_stream.h"
#include "gpu/device_buffer.h"
#include "gpu/driver_api.h"
#include "gpu/nvtx_trace.h"
#include "gpu/pinned_memory.h"

namespace orlop {

// What the queues of one device share; owned by the backend and longer-lived than they are.
struct QueueContext {
  int device = 0;
  Tracer* tracer = nullptr;
  DeviceClock* clock = nullptr;
  const DriverApi* driver = nullptr;
  const PinnedMemory* pinned = nullptr;
};

class CudaQueue final : public Queue {
 public:
  // The device is current. `workspace_bytes` of device memory belong to the queue's operations.
  CudaQueue(const QueueContext& context, std::string name, int priority, size_t workspace_bytes);

  std::string_view name() const override { return name_; }
  void record(Event& event) override;
  void wait(const Event& event) override;
  void wait_gate(Gate gate, uint32_t version) override;
  void upload(void* device, const void* host, size_t bytes) override;
  void offload(void* host, const void* device, size_t bytes) override;
  void copy_on_device(void* to, const void* from, size_t bytes) override;
  void fill_zero(void* device, size_t bytes) override;
  void synchronize() override;

  int device() const { return context_.device; }
  cudaStream_t stream() const { return stream_.get(); }
  QueueTrace& trace() { return trace_; }
  // For one operation at a time, in the queue's order. Throws Error(kUsage) when the queue has
  // less: the operations that need it run on the compute queue.
  void* workspace(size_t bytes, const char* operation) const;
  size_t workspace_bytes() const { return workspace_.bytes(); }

 private:
  QueueContext context_;
  std::string name_;
  std::string wait_name_;  // of the events recorded here
  CudaStream stream_;
  DeviceBuffer workspace_;
  CudaEvent idle_;  // synchronize() sleeps on it
  QueueTrace trace_;
};

// The queue as one of this backend. Throws Error(kUsage) for a queue of another.
CudaQueue& cuda_queue(Queue& queue);

}  // namespace orlop
