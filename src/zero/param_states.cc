#include "zero/param_states.h"

#include <bit>
#include <cstring>

#include "base/check.h"
#include "base/half.h"

namespace orlop {
namespace {

template <typename T>
T* plane_at(std::byte* base, size_t plane_bytes, int64_t offset) {
  return reinterpret_cast<T*>(base + plane_bytes) + offset;
}
template <typename T>
const T* plane_at(const std::byte* base, size_t plane_bytes, int64_t offset) {
  return reinterpret_cast<const T*>(base + plane_bytes) + offset;
}

}  // namespace

void check_range(const StatePlanes& planes, int64_t offset, size_t count) {
  check(offset >= 0 && offset + static_cast<int64_t>(count) <= planes.numel, ErrorCode::kInternal,
        "state access of elements {} + {} in a FlatParam of {}", offset, count, planes.numel);
}

StatePlanes state_planes(int64_t numel, DType compute_dtype, DType moment_dtype) {
  StatePlanes planes;
  planes.compute_dtype = compute_dtype;
  planes.moment_dtype = moment_dtype;
  planes.numel = numel;
  const size_t elements = static_cast<size_t>(numel);
  size_t end = elements * dtype_bytes(compute_dtype);
  if (compute_dtype == DType::kBF16) {
    planes.lo = end;
    end += elements * sizeof(uint16_t);
  } else if (compute_dtype == DType::kF16) {
    planes.master = end;
    end += elements * sizeof(float);
  }
  planes.exp_avg = end;
  planes.exp_avg_sq = end + elements * dtype_bytes(moment_dtype);
  planes.bytes = planes.exp_avg_sq + elements * dtype_bytes(moment_dtype);
  return planes;
}

void read_plane(const StatePlanes& planes, const std::byte* base, Plane plane, int64_t offset,
                std::span<float> values) {
  check_range(planes, offset, values.size());
  if (plane == Plane::kMaster && planes.compute_dtype == DType::kBF16) {
    const uint16_t* hi = plane_at<uint16_t>(base, 0, offset);
    const uint16_t* lo = plane_at<uint16_t>(base, planes.lo, offset);
    for (size_t i = 0; i < values.size(); ++i) {
      const int32_t rest = static_cast<int16_t>(lo[i]);
      values[i] =
          std::bit_cast<float>((static_cast<uint32_t>(hi[i]) << 16) + static_cast<uint32_t>(rest));
    }
    return;
  }
  if (plane == Plane::kMaster) {
    std::memcpy(values.data(), plane_at<float>(base, planes.master, offset), values.size_bytes());
    return;
  }
  const size_t start = plane == Plane::kExpAvg ? planes.exp_avg : planes.exp_avg_sq;
  if (planes.moment_dtype == DType::kF32) {
    std::memcpy(values.data(), plane_at<float>(base, start, offset), values.size_bytes());
    return;
  }
  const uint16_t* moments = plane_at<uint16_t>(base, start, offset);
  for (size_t i = 0; i < values.size(); ++i) values[i] = bf16_to_float(moments[i]);
}

void write_plane(const StatePlanes& planes, std::byte* base, Plane plane, int64_t offset,
                 std::span<const float> values) {
  check_range(planes, offset, values.size());
  if (plane == Plane::kMaster) {
    switch (planes.compute_dtype) {
      case DType::kBF16: {
        uint16_t* hi = plane_at<uint16_t>(base, 0, offset);
        uint16_t* lo = plane_at<uint16_t>(base, planes.lo, offset);
        for (size_t i = 0; i < values.size(); ++i) {
          const uint32_t bits = std::bit_cast<uint32_t>(values[i]);
          hi[i] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
          lo[i] = static_cast<uint16_t>(bits);
        }
        return;
      }
      case DType::kF16: {
        uint16_t* copy = plane_at<uint16_t>(base, 0, offset);
        for (size_t i = 0; i < values.size(); ++i) copy[i] = float_to_fp16(values[i]);
        break;
      }
      default:
        break;
    }
    std::memcpy(plane_at<float>(base, planes.master, offset), values.data(), values.size_bytes());
    return;
  }
  const size_t start = plane == Plane::kExpAvg ? planes.exp_avg : planes.exp_avg_sq;
  if (planes.moment_dtype == DType::kF32) {
    std::memcpy(plane_at<float>(base, start, offset), values.data(), values.size_bytes());
    return;
  }
  uint16_t* moments = plane_at<uint16_t>(base, start, offset);
  for (size_t i = 0; i < values.size(); ++i) moments[i] = float_to_bf16(values[i]);
}

std::vector<PlanePart> plane_parts(const StatePlanes& planes, Plane plane) {
  const size_t moment_bytes = dtype_bytes(planes.moment_dtype);
  if (plane == Plane::kExpAvg) return {{planes.exp_avg, moment_bytes}};
  if (plane == Plane::kExpAvgSq) return {{planes.exp_avg_sq, moment_bytes}};
  const PlanePart copy{0, dtype_bytes(planes.compute_dtype)};
  if (planes.compute_dtype == DType::kBF16) return {copy, {planes.lo, sizeof(uint16_t)}};
  if (planes.compute_dtype == DType::kF16) return {copy, {planes.master, sizeof(float)}};
  return {copy};
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

void read_compute_copy(const StatePlanes& planes, const std::byte* base, int64_t offset,
                       std::span<std::byte> out) {
  const size_t element = dtype_bytes(planes.compute_dtype);
  check_range(planes, offset, out.size() / element);
  std::memcpy(out.data(), base + static_cast<size_t>(offset) * element, out.size());
}

}  // namespace orlop
