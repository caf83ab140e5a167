#include "engine/tensor_store.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <new>

#include "base/bytes.h"
#include "base/check.h"
#include "base/half.h"
#include "cpu_adam/thread_share.h"

namespace orlop {
namespace {

constexpr int64_t kMendBlock = 8192;  // elements

constexpr const char* kGates = "versions";

bool is_weight_dtype(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

void check_spec(const TensorSpec& spec) {
  check(is_weight_dtype(spec.dtype), ErrorCode::kUsage,
        "tensor '{}': weights of dtype {} are not supported (F32, BF16, F16)", spec.name,
        dtype_name(spec.dtype));
  check(spec.moment_dtype == DType::kF32 || spec.moment_dtype == DType::kBF16, ErrorCode::kUsage,
        "tensor '{}': moments of dtype {} are not supported (F32, BF16)", spec.name,
        dtype_name(spec.moment_dtype));
  check(spec.numel >= 0, ErrorCode::kUsage, "tensor '{}': numel = {} is negative", spec.name,
        spec.numel);
  check(spec.weight_drives == nullptr || (spec.on_drives && spec.weights == nullptr),
        ErrorCode::kUsage, "tensor '{}': weights on drives need states on drives, and no memory",
        spec.name);
  check(reinterpret_cast<uintptr_t>(spec.weights) % dtype_bytes(spec.dtype) == 0, ErrorCode::kUsage,
        "tensor '{}': weights at {} are not aligned to their {} bytes", spec.name, spec.weights,
        dtype_bytes(spec.dtype));
}

// Bytes of each plane that the store itself holds; 0 for what the layout lacks.
struct PlaneBytes {
  size_t weights, lo, master, moment, gradient;
};

PlaneBytes plane_bytes(const TensorSpec& spec) {
  const auto numel = static_cast<size_t>(spec.numel);
  const size_t beside = spec.on_drives ? 0 : numel;  // elements whose states are beside the weights
  const bool keeps_copy = spec.weights == nullptr && spec.weight_drives == nullptr;
  return {.weights = keeps_copy ? numel * dtype_bytes(spec.dtype) : 0,
          .lo = spec.dtype == DType::kBF16 ? 2 * beside : 0,
          .master = spec.dtype == DType::kF16 ? 4 * beside : 0,
          .moment = beside * dtype_bytes(spec.moment_dtype),
          .gradient = spec.keep_gradient ? numel * dtype_bytes(spec.dtype) : 0};
}

size_t arena_bytes(std::span<const TensorSpec> specs) {
  size_t bytes = align_up(specs.size() * sizeof(uint32_t), kDeviceAlignment) + kPageBytes;
  for (const TensorSpec& spec : specs) {
    const PlaneBytes planes = plane_bytes(spec);
    for (const size_t plane :
         {planes.weights, planes.lo, planes.master, planes.moment, planes.moment, planes.gradient})
      bytes += align_up(plane, kDeviceAlignment);
  }
  return bytes;
}

// Null for a plane of no bytes.
template <typename T>
T* carve(HostArena& arena, size_t bytes, std::string_view purpose) {
  return bytes == 0 ? nullptr : reinterpret_cast<T*>(arena.carve(bytes, purpose).data());
}

// The planes that cross the link where the weights are on a device.
TensorStates carve_copied(HostArena& arena, const TensorSpec& spec) {
  const PlaneBytes planes = plane_bytes(spec);
  const bool fp32 = spec.dtype == DType::kF32;
  TensorStates states;
  states.weights = spec.weights;
  if (planes.weights > 0)
    states.weights = carve<void>(arena, planes.weights, fp32 ? "masters" : "weights");
  states.gradient = carve<void>(arena, planes.gradient, "gradients");
  return states;
}

void carve_rest(HostArena& arena, const TensorSpec& spec, TensorStates& states) {
  const PlaneBytes planes = plane_bytes(spec);
  states.lo = carve<uint16_t>(arena, planes.lo, "masters");
  states.master = carve<float>(arena, planes.master, "masters");
  states.exp_avg = carve<void>(arena, planes.moment, "moments");
  states.exp_avg_sq = carve<void>(arena, planes.moment, "moments");
}

}  // namespace

int64_t TensorStore::add(std::span<const TensorSpec> specs) {
  for (const TensorSpec& spec : specs) check_spec(spec);
  const std::shared_ptr<Arena> arena(new Arena{HostArena(arena_bytes(specs))});
  HostArena& memory = arena->memory;
  std::vector<Tensor> added;
  auto* gates =
      carve<std::atomic<uint32_t>>(memory, specs.size() * sizeof(std::atomic<uint32_t>), kGates);
  for (size_t i = 0; i < specs.size(); ++i) {
    Tensor tensor{specs[i], carve_copied(memory, specs[i]),
                  new (gates + i) std::atomic<uint32_t>(0), arena};
    tensor.states.written_version = reinterpret_cast<const uint32_t*>(tensor.written);
    added.push_back(std::move(tensor));
  }
  // The rest has pages of its own: drivers refuse to copy what is pinned in part.
  memory.carve(0, kGates, kPageBytes);
  arena->copied_bytes = memory.used_bytes();
  for (Tensor& tensor : added) carve_rest(memory, tensor.spec, tensor.states);
  const int64_t first = count();
  for (Tensor& tensor : added) tensors_.push_back(std::move(tensor));
  arenas_.push_back(arena);
  return first;
}

const TensorStore::Tensor& TensorStore::at(int64_t index) const {
  check(index >= 0 && index < count(), ErrorCode::kUsage, "tensor {} of {} does not exist", index,
        count());
  const Tensor& tensor = tensors_[static_cast<size_t>(index)];
  check(tensor.arena != nullptr, ErrorCode::kUsage, "the states of tensor '{}' were given up",
        tensor.spec.name);
  return tensor;
}

void TensorStore::release(int64_t index) {
  at(index);
  Tensor& tensor = tensors_[static_cast<size_t>(index)];
  const std::shared_ptr<Arena> arena = std::move(tensor.arena);
  tensor.states = {};
  tensor.written = nullptr;
  const bool is_used = std::any_of(tensors_.begin(), tensors_.end(),
                                   [&](const Tensor& other) { return other.arena == arena; });
  if (!is_used) std::erase(arenas_, arena);
}

void TensorStore::move_weights(int64_t index, void* weights) {
  TensorSpec spec = at(index).spec;
  check(spec.weights != nullptr && weights != nullptr, ErrorCode::kUsage,
        "tensor '{}': only weights in the caller's memory can move to other memory of the caller",
        spec.name);
  spec.weights = weights;
  check_spec(spec);
  Tensor& tensor = tensors_[static_cast<size_t>(index)];
  tensor.spec.weights = weights;
  tensor.states.weights = weights;
}

void check_count(const TensorStore::Tensor& tensor, size_t count) {
  check(count == static_cast<size_t>(tensor.spec.numel), ErrorCode::kUsage,
        "tensor '{}' has {} elements, {} given", tensor.spec.name, tensor.spec.numel, count);
}

AdamShard adam_shard(const TensorStore::Tensor& tensor, const GradientView& gradient) {
  const bool fp32 = tensor.spec.dtype == DType::kF32;
  AdamShard shard;
  shard.compute_dtype = tensor.spec.dtype;
  shard.moment_dtype = tensor.spec.moment_dtype;
  shard.grad_dtype = gradient.dtype;
  shard.param = fp32 ? nullptr : tensor.states.weights;
  shard.lo = tensor.states.lo;
  shard.master = fp32 ? static_cast<float*>(tensor.states.weights) : tensor.states.master;
  shard.exp_avg = tensor.states.exp_avg;
  shard.exp_avg_sq = tensor.states.exp_avg_sq;
  shard.grad = gradient.data;
  shard.numel = tensor.spec.numel;
  return shard;
}

AdamShard run_of(const AdamShard& states, int64_t first, int64_t numel) {
  const auto moved = [first](void* plane, DType dtype) -> void* {
    if (plane == nullptr) return nullptr;
    return static_cast<std::byte*>(plane) + static_cast<size_t>(first) * dtype_bytes(dtype);
  };
  AdamShard run = states;
  run.param = moved(states.param, states.compute_dtype);
  run.lo = states.lo == nullptr ? nullptr : states.lo + first;
  run.master = states.master == nullptr ? nullptr : states.master + first;
  run.exp_avg = moved(states.exp_avg, states.moment_dtype);
  run.exp_avg_sq = moved(states.exp_avg_sq, states.moment_dtype);
  run.grad = nullptr;
  run.numel = numel;
  run.rng_offset = states.rng_offset + first;
  return run;
}

void read_master(const AdamShard& states, std::span<float> values) {
  const auto* copy = static_cast<const uint16_t*>(states.param);
  for (size_t i = 0; i < values.size(); ++i) {
    if (states.compute_dtype == DType::kBF16) {
      values[i] = split_bf16_to_float(copy[i], states.lo[i]);
    } else {
      values[i] = states.master[i];
    }
  }
}

void write_master(const AdamShard& states, std::span<const float> values) {
  auto* copy = static_cast<uint16_t*>(states.param);
  for (size_t i = 0; i < values.size(); ++i) {
    if (states.compute_dtype == DType::kBF16) {
      // A NaN is made quiet and empty, so that rounding cannot carry it into another value.
      const uint32_t bits =
          values[i] == values[i] ? std::bit_cast<uint32_t>(values[i]) : 0x7fc00000u;
      copy[i] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
      states.lo[i] = static_cast<uint16_t>(bits & 0xffffu);
    } else {
      states.master[i] = values[i];
      if (states.compute_dtype == DType::kF16) copy[i] = float_to_fp16(values[i]);
    }
  }
}

bool adopt_weights(const AdamShard& states, const void* weights) {
  void* const copy = states.compute_dtype == DType::kF32 ? states.master : states.param;
  const size_t bytes = static_cast<size_t>(states.numel) * dtype_bytes(states.compute_dtype);
  if (copy != weights && bytes > 0) std::memmove(copy, weights, bytes);
  return mend_master(states, 1);
}

bool mend_master(const AdamShard& states, int threads) {
  if (states.compute_dtype != DType::kF16) return false;
  const auto* copy = static_cast<const uint16_t*>(states.param);
  float* master = states.master;
  std::atomic<bool> changed = false;
  const int64_t blocks = ceil_div(states.numel, kMendBlock);
  share_between_threads(blocks, threads, [&](int64_t first, int64_t last) {
    const int64_t end = std::min(last * kMendBlock, states.numel);
    for (int64_t i = first * kMendBlock; i < end; ++i) {
      if (copy[i] == float_to_fp16(master[i])) continue;
      master[i] = fp16_to_float(copy[i]);
      changed.store(true, std::memory_order_relaxed);
    }
  });
  return changed;
}

}  // namespace orlop
