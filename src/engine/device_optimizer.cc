#include "orlop/device_optimizer.h"

#include "base/check.h"
#include "base/shared_library.h"
#include "gpu/cuda_backend_api.h"

namespace orlop {
namespace {

// Loaded with the first call; stays for the life of the process.
struct CudaOptimizer {
  OrlopCudaScratchBytes scratch_bytes = nullptr;
  OrlopCudaAdamStep adam_step = nullptr;
  OrlopCudaSquareSum square_sum = nullptr;
  OrlopCudaCopies copies = nullptr;
  std::string error;
};

CudaOptimizer load() {
  SharedLibrary library("liborlop_cuda.so");
  CudaOptimizer cuda;
  cuda.scratch_bytes = library.find<OrlopCudaScratchBytes>("orlop_cuda_scratch_bytes");
  cuda.adam_step = library.find<OrlopCudaAdamStep>("orlop_cuda_adam_step");
  cuda.square_sum = library.find<OrlopCudaSquareSum>("orlop_cuda_square_sum");
  cuda.copies = library.find<OrlopCudaCopies>("orlop_cuda_copies");
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

size_t device_optimizer_scratch_bytes(int64_t numel) { return cuda().scratch_bytes(numel); }

void device_adam_step(const AdamShard& shard, const AdamHyper& hyper, float grad_scale,
                      void* scratch, const DeviceStream& stream) {
  cuda().adam_step(&shard, &hyper, grad_scale, scratch, &stream);
}

void device_square_sum(const void* values, DType dtype, int64_t numel, DeviceSquareSum* result,
                       void* scratch, const DeviceStream& stream) {
  check(numel >= 0, ErrorCode::kUsage, "device_square_sum: numel = {} is negative", numel);
  cuda().square_sum(values, dtype, numel, result, scratch, &stream);
}

void device_copies(std::span<const DeviceCopy> copies, const DeviceStream& stream, void* behind) {
  cuda().copies(copies.data(), copies.size(), &stream, behind);
}

}  // namespace orlop
