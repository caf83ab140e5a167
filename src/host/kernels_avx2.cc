#include <cstddef>
#include <cstdint>

#include "host/kernels.h"

#define ORLOP_LANES 8

namespace orlop::host {
namespace {
#include "host/kernels.inl.h"
// The attention kernels build on the row kernels above.
#include "host/attention.inl.h"
}  // namespace

constinit const KernelSet kAvx2Kernels = {.f32 = make_kernels<F32>(),
                                          .f16 = make_kernels<F16>(),
                                          .bf16 = make_kernels<BF16>(),
                                          .block_product = block_product};

}  // namespace orlop::host
