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

// Copies that a kernel does are at most so long, and at least so many: few go with longer ones.
constexpr size_t kSmallCopyBytes = size_t{64} << 10;
constexpr size_t kFewSmallCopies = 8;

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

bool is_default_stream(cudaStream_t stream) {
  return stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
}

// Copies between a device and pinned host memory, in one call of the driver: each by itself costs
// the thread that issues it as much as a launch. The driver takes no batch on a default stream.
void issue_batch(std::span<const DeviceCopy> copies, cudaStream_t stream) {
  if (is_default_stream(stream) || copies.size() == 1) {
    for (const DeviceCopy& copy : copies) {
      ORLOP_CUDA(cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyDefault, stream));
    }
    return;
  }
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<size_t> bytes;
  for (const DeviceCopy& copy : copies) {
    to.push_back(copy.to);
    from.push_back(copy.from);
    bytes.push_back(copy.bytes);
  }
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  size_t first = 0;  // copy that the attributes are of, and all behind it
  ORLOP_CUDA(cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), copies.size(), &attributes,
                                  &first, 1, stream));
}

void issue_copies(std::span<const DeviceCopy> copies, cudaStream_t stream) {
  std::vector<DeviceCopy> pinned;
  std::vector<kernels::SmallCopy> small;  // those of them that a kernel can do
  for (const DeviceCopy& copy : copies) {
    if (copy.bytes == 0) continue;
    void* to = copy.device_to != nullptr ? copy.device_to : orlop_cuda_device_address(copy.to);
    const void* from =
        copy.device_from != nullptr ? copy.device_from : orlop_cuda_device_address(copy.from);
    if (to == nullptr || from == nullptr) {
      ORLOP_CUDA(cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyDefault, stream));
      continue;
    }
    pinned.push_back(copy);
    if (copy.bytes <= kSmallCopyBytes) {
      small.push_back({to, from, static_cast<uint32_t>(copy.bytes)});
    }
  }
  if (small.size() == pinned.size() || small.size() > kFewSmallCopies) {
    kernels::copy_small(small, stream);
    std::erase_if(pinned, [](const DeviceCopy& copy) { return copy.bytes <= kSmallCopyBytes; });
  }
  if (!pinned.empty()) issue_batch(pinned, stream);
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

ORLOP_EXPORT void* orlop_cuda_device_address(const void* memory) {
  cudaPointerAttributes attributes{};
  ORLOP_CUDA(cudaPointerGetAttributes(&attributes, memory));
  return attributes.type == cudaMemoryTypeUnregistered ? nullptr : attributes.devicePointer;
}

ORLOP_EXPORT void orlop_cuda_copies(const DeviceCopy* copies, size_t count,
                                    const DeviceStream* stream, void* behind,
                                    const DeviceGate* gate, void* done) {
  const DeviceScope scope(stream->device);
  auto* issued = static_cast<cudaStream_t>(stream->stream);
  if (gate->address != 0) {
    static const DriverApi driver;
    driver.stream_wait_at_least(issued, gate->address, gate->version);
  }
  if (behind != stream->stream)
    put_behind(issued, static_cast<cudaStream_t>(behind), stream->device);
  issue_copies({copies, count}, issued);
  if (done != nullptr) ORLOP_CUDA(cudaEventRecord(static_cast<cudaEvent_t>(done), issued));
}
}
