#include <map>
#include <mutex>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "base/check.h"
#include "cpu_adam/adam.h"
#include "gpu/cuda_backend_api.h"
#include "gpu/cuda_devices.h"
#include "gpu/cuda_event.h"
#include "gpu/device_scope.h"
#include "gpu/driver_api.h"
#include "gpu/kernels/kernels.h"
#include "orlop/device_optimizer.h"
#include "orlop/export.h"

using namespace orlop;

namespace {

std::vector<kernels::SquareSumArgs> square_sum_args(std::span<const DeviceGradient> gradients) {
  std::vector<kernels::SquareSumArgs> args;
  args.reserve(gradients.size());
  for (const DeviceGradient& gradient : gradients) {
    args.push_back({.values = gradient.values,
                    .dtype = gradient.dtype,
                    .square_sum = &gradient.result->sum,
                    .first_nonfinite = &gradient.result->first_nonfinite,
                    .numel = gradient.numel});
  }
  return args;
}

// At most so long are the copies that a kernel does.
constexpr size_t kSmallCopyBytes = size_t{64} << 10;

// Where the device reaches memory, or null: host memory that is not pinned.
void* device_address(const void* memory) {
  cudaPointerAttributes attributes{};
  ORLOP_CUDA(cudaPointerGetAttributes(&attributes, memory));
  return attributes.type == cudaMemoryTypeUnregistered ? nullptr : attributes.devicePointer;
}

// What `stream` is given from here on runs behind what `other` was given so far. A wait is for the
// event as it is recorded then: one of each device serves all.
void put_behind(cudaStream_t stream, cudaStream_t other, int device) {
  static std::mutex mutex;
  // Never destroyed: at exit the driver may be gone before.
  static auto& events = *new std::map<int, CudaEventHandle>();
  const std::lock_guard lock(mutex);
  auto event = events.find(device);
  if (event == events.end())
    event = events.emplace(device, CudaEventHandle(cudaEventDisableTiming)).first;
  ORLOP_CUDA(cudaEventRecord(event->second.get(), other));
  ORLOP_CUDA(cudaStreamWaitEvent(stream, event->second.get(), 0));
}

void issue_copies(std::span<const DeviceCopy> copies, cudaStream_t stream) {
  std::vector<kernels::SmallCopy> small;
  small.reserve(copies.size());
  for (const DeviceCopy& copy : copies) {
    if (copy.bytes == 0) continue;
    if (copy.bytes <= kSmallCopyBytes) {
      void* to = device_address(copy.to);
      const void* from = device_address(copy.from);
      if (to != nullptr && from != nullptr) {
        small.push_back({to, from, static_cast<uint32_t>(copy.bytes)});
        continue;
      }
    }
    ORLOP_CUDA(cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyDefault, stream));
  }
  kernels::copy_small(small, stream);
}

}  // namespace

extern "C" {

ORLOP_EXPORT void orlop_cuda_check_device(int32_t device) {
  static_cast<void>(check_cuda_device(device));
}

ORLOP_EXPORT size_t orlop_cuda_adam_scratch_bytes() {
  return align_up(sizeof(StepScalars), kDeviceAlignment);
}

ORLOP_EXPORT void orlop_cuda_adam_step(const AdamShard* shard, const AdamHyper* hyper,
                                       float grad_scale, void* scratch,
                                       const DeviceStream* stream) {
  check_adam_shard(*shard);
  check(shard->grad_dtype == shard->compute_dtype, ErrorCode::kUsage,
        "device_adam_step: the gradient is {}, on a device it is to be {} as the weights are",
        dtype_name(shard->grad_dtype), dtype_name(shard->compute_dtype));
  const AdamConstants constants = adam_constants(*hyper, grad_scale);
  const DeviceScope scope(stream->device);
  auto* issued = static_cast<cudaStream_t>(stream->stream);
  StepScalars scalars;
  scalars.grad_scale = constants.grad_scale;
  // From pageable memory: read before the call returns.
  ORLOP_CUDA(cudaMemcpyAsync(scratch, &scalars, sizeof(scalars), cudaMemcpyHostToDevice, issued));
  kernels::device_adam({*shard, *hyper, static_cast<const StepScalars*>(scratch)}, constants,
                       issued);
}

ORLOP_EXPORT void orlop_cuda_load(int device) {
  const DeviceScope scope(device);
  kernels::load_square_sums();
  kernels::load_copy_small();
}

ORLOP_EXPORT size_t orlop_cuda_square_sums_scratch_bytes(const DeviceGradient* gradients,
                                                         size_t count) {
  return kernels::square_sums_scratch_bytes(square_sum_args({gradients, count}));
}

ORLOP_EXPORT void orlop_cuda_square_sums(const DeviceGradient* gradients, size_t count,
                                         void* scratch, const DeviceStream* stream) {
  const DeviceScope scope(stream->device);
  kernels::square_sums(square_sum_args({gradients, count}), scratch,
                       static_cast<cudaStream_t>(stream->stream));
}

ORLOP_EXPORT void orlop_cuda_copies(const DeviceCopy* copies, size_t count,
                                    const DeviceStream* stream, void* behind,
                                    const DeviceGate* gate) {
  const DeviceScope scope(stream->device);
  auto* issued = static_cast<cudaStream_t>(stream->stream);
  if (gate->address != 0) {
    static const DriverApi driver;
    driver.stream_wait_at_least(issued, gate->address, gate->version);
  }
  if (behind != stream->stream)
    put_behind(issued, static_cast<cudaStream_t>(behind), stream->device);
  issue_copies({copies, count}, issued);
}
}
