#pragma once

#include <cuda_runtime_api.h>

#include <utility>

#include "backend/backend.h"
#include "gpu/cuda_check.h"
#include "gpu/device_scope.h"

namespace orlop {

// Owns one event handle of the current device.
class CudaEventHandle {
 public:
  // `flags` as of cudaEventCreateWithFlags.
  explicit CudaEventHandle(unsigned flags) { ORLOP_CUDA(cudaEventCreateWithFlags(&event_, flags)); }
  CudaEventHandle(CudaEventHandle&& other) noexcept
      : event_(std::exchange(other.event_, nullptr)) {}
  CudaEventHandle& operator=(CudaEventHandle&& other) = delete;
  ~CudaEventHandle() {
    if (event_ != nullptr) log_cuda_error(cudaEventDestroy(event_), "cudaEventDestroy");
  }

  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

// Event of the interface: without timing, and a waiting thread sleeps, since its core is the
// optimizer's.
class CudaEvent final : public Event {
 public:
  // `device` is current.
  explicit CudaEvent(int device)
      : device_(device), handle_(cudaEventDisableTiming | cudaEventBlockingSync) {}

  void synchronize() override {
    const DeviceScope scope(device_);
    ORLOP_CUDA(cudaEventSynchronize(handle_.get()));
  }
  bool query() const override {
    const DeviceScope scope(device_);
    const cudaError_t result = cudaEventQuery(handle_.get());
    if (result == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());
      return false;
    }
    cuda_check(result, "cudaEventQuery", __FILE__, __LINE__);
    return true;
  }

  cudaEvent_t get() const { return handle_.get(); }

  // What a queue does that waits for this event, as its trace has it: told by the queue that has
  // recorded the event, which owns the text.
  const char* wait_name() const { return wait_name_; }
  void set_wait_name(const char* name) { wait_name_ = name; }

 private:
  const char* wait_name_ = "wait";
  int device_;
  CudaEventHandle handle_;
};

}  // namespace orlop
