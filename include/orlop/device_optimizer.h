#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "orlop/cpu_adam.h"
#include "orlop/export.h"

// The optimizer on a GPU, over device memory that somebody else owns (PyTorch's allocator), in the
// order of somebody else's stream. The bits are those of cpu_adam.h.
namespace orlop {

// Where work is issued; `stream` is a cudaStream_t of the device.
struct DeviceStream {
  int device = 0;
  void* stream = nullptr;
};

// What device_square_sums() writes, in device memory.
struct DeviceSquareSum {
  double sum = 0;
  int64_t first_nonfinite = -1;  // index of the first NaN or Inf, or -1
};

// One copy between device memory and host memory, in either direction. Who copies often can tell
// where the device reaches both, so that nobody asks the driver.
struct DeviceCopy {
  void* to = nullptr;
  const void* from = nullptr;
  size_t bytes = 0;
  void* device_to = nullptr;
  const void* device_from = nullptr;
};

// A word of pinned host memory, by its address on the device, that is to reach `version` (compared
// as a signed difference).
struct DeviceGate {
  uint64_t address = 0;  // 0: nothing to wait for
  uint32_t version = 0;
};

// A gradient in device memory (numel; F32, BF16 or F16), and where the sum of its squares goes.
struct DeviceGradient {
  const void* values = nullptr;
  DType dtype = DType::kF32;
  int64_t numel = 0;
  DeviceSquareSum* result = nullptr;
};

// All calls throw Error(kDevice) without the CUDA part of Orlop. Their scratch is device memory,
// aligned to 256 bytes, and in use until the work on the stream has run.

// Brings the code of device_square_sums() and device_copies() to a device. Without it the first
// call of each does, and may wait for all that the device was given before.
ORLOP_EXPORT void device_load(int device);

// Throws Error(kDevice) where the driver is missing or too old for this build, with the versions of
// both, and Error(kUsage) for a device that is not there.
ORLOP_EXPORT void check_device(int device);

// Where the device reaches memory, or null: host memory that is not pinned.
ORLOP_EXPORT void* device_address(const void* memory);

ORLOP_EXPORT size_t device_adam_scratch_bytes();

// One Adam step over planes in device memory. The gradient has the compute dtype. Throws
// Error(kUsage) as adam_step() does.
ORLOP_EXPORT void device_adam_step(const AdamShard& shard, const AdamHyper& hyper, float grad_scale,
                                   void* scratch, const DeviceStream& stream);

ORLOP_EXPORT size_t device_square_sums_scratch_bytes(std::span<const DeviceGradient> gradients);

// Sums of squares as grad_square_sum() adds them, in one launch for 64 gradients of one dtype. The
// first 256 bytes of the scratch are zero before its first use; a call leaves them so. Throws
// Error(kUsage) for another dtype or a negative count.
ORLOP_EXPORT void device_square_sums(std::span<const DeviceGradient> gradients, void* scratch,
                                     const DeviceStream& stream);

// Issues copies, which do not overlap, behind the gate and behind what `behind`, a cudaStream_t of
// the same device, was given so far: in one call of the driver, or, where all are small, in one
// launch. Behind them the cudaEvent_t `done` is recorded, unless it is null. The call waits for
// those whose host memory is not pinned, and for no others.
ORLOP_EXPORT void device_copies(std::span<const DeviceCopy> copies, const DeviceStream& stream,
                                void* behind, const DeviceGate& gate = {}, void* done = nullptr);

}  // namespace orlop
