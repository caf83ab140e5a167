#pragma once

#include <cstdint>

#include "cpu_adam/adam_kernel.h"
#include "cpu_adam/cpu_features.h"
#include "orlop/cpu_adam.h"

namespace orlop {

// The fp32 constants of one step, computed once in fp64 and rounded once; `grad_scale` carries the
// sign of maximize. Shared by every instruction set and by the GPU. Throws Error(kUsage) for
// hyperparameters outside their range.
AdamConstants adam_constants(const AdamHyper& hyper, float grad_scale);

// The key of the generator for the elements whose index has `index_high` as its upper 32 bits (the
// formula is beside AdamRngKey). Shared with the GPU, which splits its launches at multiples of
// 2^32.
AdamRngKey adam_rng_key(uint64_t seed, int64_t step, uint32_t index_high);

// Throws Error(kUsage) unless the planes of `shard` are those of its layout; names the plane.
void check_adam_shard(const AdamShard& shard);

}  // namespace orlop
