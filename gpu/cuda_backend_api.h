#pragma once

#include <cstddef>
#include <cstdint>

#include "orlop/device_optimizer.h"

// What liborlop_cuda.so and liborlop_cuda_optimizer.so export. They are loaded on demand (dlopen)
// by a program of the same build, so that nothing else links CUDA; find the functions by the names
// below.
namespace orlop {

class Backend;
class Communicator;
class Tracer;

struct CudaBackendOptions {
  int32_t device_index = 0;  // among the devices that CUDA_VISIBLE_DEVICES leaves
  // Device memory that everything together may take: context, libraries, workspaces and arena. A
  // hard limit; 0: what is free.
  size_t device_bytes = 0;
  Tracer* tracer = nullptr;  // lanes for copies and kernels; outlives the backend
  bool deterministic_attention = true;
  // Choose matmul algorithms by timing instead of by the heuristic alone; runs may then differ in
  // bits.
  bool autotune = false;
  // Matmuls and attention by plain kernels instead of cuBLASLt's and cuDNN's: slow, for checkers of
  // our own kernels that cannot follow the libraries'.
  bool own_kernels_only = false;
};

// The ranks of `host`, one GPU each.
struct NcclOptions {
  int32_t device_index = 0;
  Communicator* host = nullptr;  // outlives the communicator
  // A collective that has not ended so long after those before it has failed.
  double timeout_seconds = 1800;
};

}  // namespace orlop

extern "C" {

// Makes a backend; the caller deletes it, before the library is unloaded and with all gates open.
// Throws orlop::Error: kUsage for a bad index, kDevice for no GPU, an old driver or a device that
// this build has no code for, kDoesNotFit for a budget below the fixed overhead.
orlop::Backend* orlop_make_cuda_backend(const orlop::CudaBackendOptions* options);
using OrlopMakeCudaBackend = orlop::Backend* (*)(const orlop::CudaBackendOptions*);

// Devices that can be named by device_index; 0 without a GPU or a usable driver. Never throws.
int32_t orlop_cuda_device_count();
using OrlopCudaDeviceCount = int32_t (*)();

// All ranks of options->host call it together; the caller deletes the communicator, on all ranks,
// after the queues that it has worked on are idle. Throws orlop::Error(kCommunicator).
orlop::Communicator* orlop_make_nccl_communicator(const orlop::NcclOptions* options);
using OrlopMakeNcclCommunicator = orlop::Communicator* (*)(const orlop::NcclOptions*);

// The version of Orlop that a library is of; both have it.
const char* orlop_cuda_version();

// The functions of orlop/device_optimizer.h: liborlop_cuda_optimizer.so.
void orlop_cuda_check_device(int32_t device);
using OrlopCudaCheckDevice = void (*)(int32_t);

size_t orlop_cuda_adam_scratch_bytes();
using OrlopCudaAdamScratchBytes = size_t (*)();

void orlop_cuda_adam_step(const orlop::AdamShard* shard, const orlop::AdamHyper* hyper,
                          float grad_scale, void* scratch, const orlop::DeviceStream* stream);
using OrlopCudaAdamStep = void (*)(const orlop::AdamShard*, const orlop::AdamHyper*, float, void*,
                                   const orlop::DeviceStream*);

void orlop_cuda_load(int device);
using OrlopCudaLoad = void (*)(int);

size_t orlop_cuda_square_sums_scratch_bytes(const orlop::DeviceGradient* gradients, size_t count);
using OrlopCudaSquareSumsScratchBytes = size_t (*)(const orlop::DeviceGradient*, size_t);

void orlop_cuda_square_sums(const orlop::DeviceGradient* gradients, size_t count, void* scratch,
                            const orlop::DeviceStream* stream);
using OrlopCudaSquareSums = void (*)(const orlop::DeviceGradient*, size_t, void*,
                                     const orlop::DeviceStream*);

void* orlop_cuda_device_address(const void* memory);
using OrlopCudaDeviceAddress = void* (*)(const void*);

void orlop_cuda_copies(const orlop::DeviceCopy* copies, size_t count,
                       const orlop::DeviceStream* stream, void* behind,
                       const orlop::DeviceGate* gate, void* done);
using OrlopCudaCopies = void (*)(const orlop::DeviceCopy*, size_t, const orlop::DeviceStream*,
                                 void*, const orlop::DeviceGate*, void*);
}
