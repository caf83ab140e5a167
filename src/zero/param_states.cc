#include "zero/param_states.h"

#include <bit>
#include <cstring>

#include "base/check.h"
#include "base/half.h"

namespace orlop {
namespace {

template <typename T>
T* plane_at(std::byte* part, size_t plane_bytes, int64_t offset) {
  return reinterpret_cast<T*>(part + plane_bytes) + offset;
}

// In the fp32 layout it is the master.
void write_copy(const StatePlanes& planes, const StateAddress& base, int64_t offset,
                std::span<const float> values) {
  if (planes.compute_dtype == DType::kF32) {
    std::memcpy(plane_at<float>(base.copy, 0, offset), values.data(), values.size_bytes());
    return;
  }
  uint16_t* copy = plane_at<uint16_t>(base.copy, 0, offset);
  if (planes.compute_dtype == DType::kF16) {
    for (size_t i = 0; i < values.size(); ++i) copy[i] = float_to_fp16(values[i]);
    return;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    copy[i] = static_cast<uint16_t>((std::bit_cast<uint32_t>(values[i]) + 0x8000u) >> 16);
  }
}

// What of the master does not lie in the compute copy.
void write_master_rest(const StatePlanes& planes, const StateAddress& base, int64_t offset,
                       std::span<const float> values) {
  if (planes.compute_dtype == DType::kF16) {
    std::memcpy(plane_at<float>(base.rest, planes.master, offset), values.data(),
                values.size_bytes());
  } else if (planes.compute_dtype == DType::kBF16) {
    uint16_t* lo = plane_at<uint16_t>(base.rest, planes.master, offset);
    for (size_t i = 0; i < values.size(); ++i) {
      lo[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(values[i]));
    }
  }
}

// The fp32 master: in the fp32 layout it is the compute copy.
float* master_at(const StatePlanes& planes, const StateAddress& base, int64_t offset) {
  if (planes.compute_dtype == DType::kF32) return plane_at<float>(base.copy, 0, offset);
  return plane_at<float>(base.rest, planes.master, offset);
}

}  // namespace

void check_range(const StatePlanes& planes, int64_t offset, size_t count) {
  check(offset >= 0 && offset + static_cast<int64_t>(count) <= planes.numel, ErrorCode::kInternal,
        "state access of elements {} + {} in a FlatParam of {}", offset, count, planes.numel);
}

StatePlanes state_planes(int64_t numel, DType compute_dtype, DType moment_dtype, bool copy_alone) {
  StatePlanes planes;
  planes.compute_dtype = compute_dtype;
  planes.moment_dtype = moment_dtype;
  planes.numel = numel;
  const size_t elements = static_cast<size_t>(numel);
  planes.copy_bytes = elements * dtype_bytes(compute_dtype);
  planes.copy_alone = copy_alone;
  if (copy_alone) return planes;
  if (compute_dtype == DType::kBF16) planes.exp_avg = elements * sizeof(uint16_t);
  if (compute_dtype == DType::kF16) planes.exp_avg = elements * sizeof(float);
  planes.exp_avg_sq = planes.exp_avg + elements * dtype_bytes(moment_dtype);
  planes.rest_bytes = planes.exp_avg_sq + elements * dtype_bytes(moment_dtype);
  return planes;
}

void read_plane(const StatePlanes& planes, const StateAddress& base, Plane plane, int64_t offset,
                std::span<float> values) {
  check_range(planes, offset, values.size());
  ORLOP_INVARIANT(!planes.copy_alone);
  if (plane == Plane::kMaster && planes.compute_dtype == DType::kBF16) {
    const uint16_t* hi = plane_at<uint16_t>(base.copy, 0, offset);
    const uint16_t* lo = plane_at<uint16_t>(base.rest, planes.master, offset);
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = split_bf16_to_float(hi[i], lo[i]);
    }
    return;
  }
  if (plane == Plane::kMaster) {
    std::memcpy(values.data(), master_at(planes, base, offset), values.size_bytes());
    return;
  }
  const size_t start = plane == Plane::kExpAvg ? planes.exp_avg : planes.exp_avg_sq;
  if (planes.moment_dtype == DType::kF32) {
    std::memcpy(values.data(), plane_at<float>(base.rest, start, offset), values.size_bytes());
    return;
  }
  const uint16_t* moments = plane_at<uint16_t>(base.rest, start, offset);
  for (size_t i = 0; i < values.size(); ++i) values[i] = bf16_to_float(moments[i]);
}

void write_plane(const StatePlanes& planes, const StateAddress& base, Plane plane, int64_t offset,
                 std::span<const float> values) {
  check_range(planes, offset, values.size());
  ORLOP_INVARIANT(planes.takes(plane));
  if (plane == Plane::kMaster) {
    write_copy(planes, base, offset, values);
    if (!planes.copy_alone) write_master_rest(planes, base, offset, values);
    return;
  }
  const size_t start = plane == Plane::kExpAvg ? planes.exp_avg : planes.exp_avg_sq;
  if (planes.moment_dtype == DType::kF32) {
    std::memcpy(plane_at<float>(base.rest, start, offset), values.data(), values.size_bytes());
    return;
  }
  uint16_t* moments = plane_at<uint16_t>(base.rest, start, offset);
  for (size_t i = 0; i < values.size(); ++i) moments[i] = float_to_bf16(values[i]);
}

std::vector<PlanePart> plane_parts(const StatePlanes& planes, const StateAddress& base,
                                   Plane plane) {
  const size_t moment_bytes = dtype_bytes(planes.moment_dtype);
  if (plane == Plane::kExpAvg) return {{base.rest + planes.exp_avg, moment_bytes}};
  if (plane == Plane::kExpAvgSq) return {{base.rest + planes.exp_avg_sq, moment_bytes}};
  const PlanePart copy{base.copy, dtype_bytes(planes.compute_dtype)};
  if (planes.copy_alone) return {copy};
  std::byte* const master = base.rest + planes.master;
  if (planes.compute_dtype == DType::kBF16) return {copy, {master, sizeof(uint16_t)}};
  if (planes.compute_dtype == DType::kF16) return {copy, {master, sizeof(float)}};
  return {copy};
}

AdamShard adam_shard(const StatePlanes& planes, const StateAddress& base, int64_t offset,
                     int64_t numel) {
  const size_t first = static_cast<size_t>(offset);
  const size_t moment_bytes = dtype_bytes(planes.moment_dtype);
  AdamShard shard;
  shard.compute_dtype = planes.compute_dtype;
  shard.moment_dtype = planes.moment_dtype;
  shard.grad_dtype = planes.compute_dtype;
  shard.numel = numel;
  if (planes.compute_dtype != DType::kF32) {
    shard.param = base.copy + first * dtype_bytes(planes.compute_dtype);
  }
  if (planes.compute_dtype == DType::kBF16) {
    shard.lo = plane_at<uint16_t>(base.rest, planes.master, offset);
  } else {
    shard.master = master_at(planes, base, offset);
  }
  shard.exp_avg = base.rest + planes.exp_avg + first * moment_bytes;
  shard.exp_avg_sq = base.rest + planes.exp_avg_sq + first * moment_bytes;
  return shard;
}

std::vector<DecayRun> decay_runs(const FlatParamLayout& layout, const ShardRange& shard) {
  std::vector<DecayRun> runs;
  for (const Segment& segment : layout.segments) {
    if (!runs.empty() && runs.back().decay == segment.decay) continue;
    if (!runs.empty()) runs.back().numel = segment.offset - runs.back().begin;
    runs.push_back({runs.empty() ? 0 : segment.offset, 0, segment.decay});
  }
  if (!runs.empty()) runs.back().numel = layout.numel - runs.back().begin;
  std::vector<DecayRun> own;
  for (const DecayRun& run : runs) {
    const ElementRange part = intersect({run.begin, run.numel}, {shard.begin, shard.numel});
    if (part.numel > 0) own.push_back({part.begin, part.numel, run.decay});
  }
  return own;
}

}  // namespace orlop
