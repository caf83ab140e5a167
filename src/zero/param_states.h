#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "model/param_layout.h"
#include "orlop/cpu_adam.h"
#include "orlop/types.h"
#include "zero/partition.h"

namespace orlop {

enum class Plane : uint8_t { kMaster, kExpAvg, kExpAvgSq };

// How the states of a run of elements lie in memory: the compute copy, and the rest side by side.
// Offsets in bytes, of every plane from the start of its part:
//   bf16  hi (2 B) | lo (2 B), exp_avg, exp_avg_sq      master bits = (hi << 16) + int16(lo)
//   fp16  copy (2 B) | master (4 B), exp_avg, exp_avg_sq
//   fp32  master (4 B) | exp_avg, exp_avg_sq
// Where only evaluations run there is the compute copy alone: it takes a master, rounded, and gives
// none back.
struct StatePlanes {
  DType compute_dtype = DType::kBF16;
  DType moment_dtype = DType::kF32;
  int64_t numel = 0;
  size_t copy_bytes = 0;
  size_t master = 0;  // of the rest: lo, or the fp16 layout's master
  size_t exp_avg = 0;
  size_t exp_avg_sq = 0;
  size_t rest_bytes = 0;
  bool copy_alone = false;

  size_t bytes() const { return copy_bytes + rest_bytes; }
  bool takes(Plane plane) const { return plane == Plane::kMaster || !copy_alone; }
};

StatePlanes state_planes(int64_t numel, DType compute_dtype, DType moment_dtype,
                         bool copy_alone = false);

// Where the two parts lie. In a state buffer the rest follows the compute copy without a gap, so
// that the copy is uploaded from, or is, the start of the buffer; on the way to and from a drive
// they may lie apart.
struct StateAddress {
  std::byte* copy = nullptr;
  std::byte* rest = nullptr;
};

inline StateAddress state_address(const StatePlanes& planes, std::byte* buffer) {
  return {buffer, buffer + planes.copy_bytes};
}

// Throws Error(kInternal) when [offset, offset + count) leaves the FlatParam.
void check_range(const StatePlanes& planes, int64_t offset, size_t count);

// Elements [offset, offset + values.size()) of one plane, as fp32.
void read_plane(const StatePlanes& planes, const StateAddress& base, Plane plane, int64_t offset,
                std::span<float> values);

// The reverse. Writing the master also writes the compute copy (bf16: hi plane rounds half up,
// fp16: nearest even). Writing a moment that is kept in bf16 rounds to nearest even; values that
// came from such a moment survive exactly.
void write_plane(const StatePlanes& planes, const StateAddress& base, Plane plane, int64_t offset,
                 std::span<const float> values);

// The arrays that a plane consists of: where element 0 of each lies, and bytes per element. Of the
// master: also the compute copy, which is written with it.
struct PlanePart {
  std::byte* address = nullptr;
  size_t element_bytes = 0;
};

std::vector<PlanePart> plane_parts(const StatePlanes& planes, const StateAddress& base,
                                   Plane plane);

// What Adam reads and writes of elements [offset, offset + numel), but for the gradient, which has
// the compute dtype. rng_offset is the caller's.
AdamShard adam_shard(const StatePlanes& planes, const StateAddress& base, int64_t offset,
                     int64_t numel);

// A run of elements of a FlatParam with one weight-decay setting.
struct DecayRun {
  int64_t begin = 0;
  int64_t numel = 0;
  bool decay = true;
};

// Covers a rank's part of the FlatParam, without its padding; gaps go with the tensor before them.
// Elements count from the start of the FlatParam.
std::vector<DecayRun> decay_runs(const FlatParamLayout& layout, const ShardRange& shard);

// Every FlatParam has its own stream of random numbers for stochastic rounding.
constexpr uint64_t param_seed(uint64_t seed, int param) {
  return seed + static_cast<uint64_t>(param + 1) * 0x9e3779b97f4a7c15u;
}

}  // namespace orlop
