#include <algorithm>
#include <cstdint>

#include "base/bytes.h"
#include "gpu/cuda_check.h"
#include "gpu/kernels/kernels.h"
#include "gpu/kernels/load_kernel.h"

// Small copies between device memory and pinned host memory, many in one launch: a copy engine
// takes each by itself, and so does the thread that issues it.
namespace orlop::kernels {
namespace {

constexpr int kBlock = 256;
constexpr int64_t kBlockBytes = int64_t{16} << 10;
constexpr int64_t kWordBytes = sizeof(uint4);
constexpr size_t kCopiesPerLaunch = 128;  // what the parameters of a launch have room for

struct Copies {
  SmallCopy items[kCopiesPerLaunch];
};

__device__ __forceinline__ bool is_aligned(const void* to, const void* from) {
  return ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % kWordBytes) == 0;
}

// Block (x, y) copies the x-th part of the y-th copy.
__global__ void __launch_bounds__(kBlock) copy_small_kernel(const __grid_constant__ Copies copies) {
  const SmallCopy& copy = copies.items[blockIdx.y];
  const int64_t begin = blockIdx.x * kBlockBytes;
  const int64_t bytes = min(kBlockBytes, static_cast<int64_t>(copy.bytes) - begin);
  auto* to = static_cast<unsigned char*>(copy.to) + begin;
  const auto* from = static_cast<const unsigned char*>(copy.from) + begin;
  int64_t done = 0;
  if (is_aligned(to, from)) {
    const int64_t words = bytes / kWordBytes;
    for (int64_t i = threadIdx.x; i < words; i += kBlock) {
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
    done = words * kWordBytes;
  }
  for (int64_t i = done + threadIdx.x; i < bytes; i += kBlock) to[i] = from[i];
}

}  // namespace

void load_copy_small() { load_kernel(copy_small_kernel); }

void copy_small(std::span<const SmallCopy> copies, cudaStream_t stream) {
  while (!copies.empty()) {
    const auto part = copies.first(std::min(copies.size(), kCopiesPerLaunch));
    Copies args;
    int64_t most = 1;
    for (size_t i = 0; i < part.size(); ++i) {
      args.items[i] = part[i];
      most = std::max(most, static_cast<int64_t>(part[i].bytes));
    }
    const dim3 grid(static_cast<unsigned>(ceil_div(most, kBlockBytes)),
                    static_cast<unsigned>(part.size()));
    copy_small_kernel<<<grid, kBlock, 0, stream>>>(args);
    ORLOP_CUDA_LAUNCHED("copy_small_kernel");
    copies = copies.subspan(part.size());
  }
}

}  // namespace orlop::kernels
