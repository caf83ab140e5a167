#include "gpu/cuda_queue.h"

#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "gpu/device_scope.h"

namespace orlop {

CudaQueue::CudaQueue(const QueueContext& context, std::string name, int priority,
                     size_t workspace_bytes)
    : context_(context),
      name_(std::move(name)),
      wait_name_("wait for " + name_),
      stream_(priority),
      workspace_(workspace_bytes),
      idle_(context.device),
      trace_(context.tracer, context.clock, "gpu " + name_, stream_.get()) {}

void CudaQueue::record(Event& event) {
  const DeviceScope scope(context_.device);
  auto& recorded = static_cast<CudaEvent&>(event);
  ORLOP_CUDA(cudaEventRecord(recorded.get(), stream_.get()));
  recorded.set_wait_name(wait_name_.c_str());
}

void CudaQueue::wait(const Event& event) {
  const DeviceScope scope(context_.device);
  const auto& recorded = static_cast<const CudaEvent&>(event);
  const QueueTrace::Span span(trace_, recorded.wait_name());
  ORLOP_CUDA(cudaStreamWaitEvent(stream_.get(), recorded.get(), cudaEventWaitDefault));
}

void CudaQueue::wait_gate(Gate gate, uint32_t version) {
  const DeviceScope scope(context_.device);
  void* address = nullptr;
  const cudaError_t result = cudaHostGetDevicePointer(&address, gate.value, 0);
  if (result != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    fail(ErrorCode::kUsage, "queue '{}': the gate at {} is not in registered host memory ({})",
         name_, static_cast<const void*>(gate.value), cudaGetErrorName(result));
  }
  const QueueTrace::Span span(trace_, "wait_gate");
  context_.driver->stream_wait_at_least(stream_.get(), reinterpret_cast<CUdeviceptr>(address),
                                        version);
}

void CudaQueue::upload(void* device, const void* host, size_t bytes) {
  if (bytes == 0) return;
  const DeviceScope scope(context_.device);
  const QueueTrace::Span span(trace_, "upload");
  context_.pinned->for_each_piece(host, bytes, [&](size_t offset, size_t part) {
    ORLOP_CUDA(cudaMemcpyAsync(static_cast<char*>(device) + offset,
                               static_cast<const char*>(host) + offset, part,
                               cudaMemcpyHostToDevice, stream_.get()));
  });
}

void CudaQueue::offload(void* host, const void* device, size_t bytes) {
  if (bytes == 0) return;
  const DeviceScope scope(context_.device);
  const QueueTrace::Span span(trace_, "offload");
  context_.pinned->for_each_piece(host, bytes, [&](size_t offset, size_t part) {
    ORLOP_CUDA(cudaMemcpyAsync(static_cast<char*>(host) + offset,
                               static_cast<const char*>(device) + offset, part,
                               cudaMemcpyDeviceToHost, stream_.get()));
  });
}

void CudaQueue::copy_on_device(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  const DeviceScope scope(context_.device);
  const QueueTrace::Span span(trace_, "copy_on_device");
  ORLOP_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_.get()));
}

void CudaQueue::fill_zero(void* device, size_t bytes) {
  if (bytes == 0) return;
  const DeviceScope scope(context_.device);
  const QueueTrace::Span span(trace_, "fill_zero");
  ORLOP_CUDA(cudaMemsetAsync(device, 0, bytes, stream_.get()));
}

void CudaQueue::synchronize() {
  record(idle_);
  idle_.synchronize();
  const DeviceScope scope(context_.device);
  trace_.collect();
}

void* CudaQueue::workspace(size_t bytes, const char* operation) const {
  check(bytes <= workspace_.bytes(), ErrorCode::kUsage,
        "{} on queue '{}' needs {} of workspace, the queue has {}", operation, name_,
        format_bytes(bytes), format_bytes(workspace_.bytes()));
  return workspace_.data();
}

CudaQueue& cuda_queue(Queue& queue) {
  auto* cuda = dynamic_cast<CudaQueue*>(&queue);
  check(cuda != nullptr, ErrorCode::kUsage, "queue '{}' does not belong to the CUDA backend",
        queue.name());
  return *cuda;
}

}  // namespace orlop
