#include "orlop/device_optimizer.h"

#include "base/check.h"
#include "engine/cuda_library.h"
#include "gpu/cuda_backend_api.h"

namespace orlop {
namespace {

// Loaded with the first call; stays for the life of the process.
struct CudaOptimizer {
  OrlopCudaAdamScratchBytes adam_scratch_bytes = nullptr;
  OrlopCudaAdamStep adam_step = nullptr;
  OrlopCudaSquareSumsScratchBytes square_sums_scratch_bytes = nullptr;
  OrlopCudaSquareSums square_sums = nullptr;
  OrlopCudaCopies copies = nullptr;
  OrlopCudaDeviceAddress device_address = nullptr;
  OrlopCudaLoad load = nullptr;
  OrlopCudaCheckDevice check_device = nullptr;
  std::string error;
};

CudaOptimizer load() {
  SharedLibrary library = load_cuda_library("liborlop_cuda_optimizer.so");
  CudaOptimizer cuda;
  cuda.adam_scratch_bytes =
      library.find<OrlopCudaAdamScratchBytes>("orlop_cuda_adam_scratch_bytes");
  cuda.adam_step = library.find<OrlopCudaAdamStep>("orlop_cuda_adam_step");
  cuda.square_sums_scratch_bytes =
      library.find<OrlopCudaSquareSumsScratchBytes>("orlop_cuda_square_sums_scratch_bytes");
  cuda.square_sums = library.find<OrlopCudaSquareSums>("orlop_cuda_square_sums");
  cuda.device_address = library.find<OrlopCudaDeviceAddress>("orlop_cuda_device_address");
  cuda.copies = library.find<OrlopCudaCopies>("orlop_cuda_copies");
  cuda.load = library.find<OrlopCudaLoad>("orlop_cuda_load");
  cuda.check_device = library.find<OrlopCudaCheckDevice>("orlop_cuda_check_device");
  cuda.error = library.error();
  return cuda;
}

const CudaOptimizer& cuda() {
  static const CudaOptimizer library = load();
  check(library.error.empty(), ErrorCode::kDevice,
        "optimizer states on a GPU: the CUDA part of Orlop cannot be loaded: {}; keep them in host "
        "memory, or install a build with CUDA and an NVIDIA driver",
        library.error);
  return library;
}

}  // namespace

void device_load(int device) { cuda().load(device); }
void check_device(int device) { cuda().check_device(device); }

void* device_address(const void* memory) { return cuda().device_address(memory); }

size_t device_adam_scratch_bytes() { return cuda().adam_scratch_bytes(); }

void device_adam_step(const AdamShard& shard, const AdamHyper& hyper, float grad_scale,
                      void* scratch, const DeviceStream& stream) {
  cuda().adam_step(&shard, &hyper, grad_scale, scratch, &stream);
}

size_t device_square_sums_scratch_bytes(std::span<const DeviceGradient> gradients) {
  return cuda().square_sums_scratch_bytes(gradients.data(), gradients.size());
}

void device_square_sums(std::span<const DeviceGradient> gradients, void* scratch,
                        const DeviceStream& stream) {
  for (const DeviceGradient& gradient : gradients) {
    const DType dtype = gradient.dtype;
    check(gradient.numel >= 0, ErrorCode::kUsage, "device_square_sums: numel = {} is negative",
          gradient.numel);
    check(dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16, ErrorCode::kUsage,
          "device_square_sums: dtype {} is not F32, BF16 or F16", dtype_name(dtype));
  }
  cuda().square_sums(gradients.data(), gradients.size(), scratch, &stream);
}

void device_copies(std::span<const DeviceCopy> copies, const DeviceStream& stream, void* behind,
                   const DeviceGate& gate, void* done) {
  cuda().copies(copies.data(), copies.size(), &stream, behind, &gate, done);
}

}  // namespace orlop
