#include "engine/tensor_homes.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace orlop {
namespace {

AdamShard whole(const TensorStore::Tensor& tensor) { return adam_shard(tensor, GradientView{}); }

// The elements of `values`, which begin with element `first` of the tensor, that a run has.
template <typename T>
std::span<T> part_of(std::span<T> values, int64_t first, const AdamShard& run, int64_t begin,
                     size_t element_bytes = 1) {
  return values.subspan(static_cast<size_t>(begin - first) * element_bytes,
                        static_cast<size_t>(run.numel) * element_bytes);
}

size_t element_bytes(const TensorSpec& spec, StatePlane plane) {
  if (plane != StatePlane::kMasterRest) return dtype_bytes(spec.moment_dtype);
  check(spec.dtype != DType::kF32, ErrorCode::kUsage,
        "tensor '{}' has no master beside its fp32 weights", spec.name);
  return spec.dtype == DType::kBF16 ? sizeof(uint16_t) : sizeof(float);
}

void* plane_of(const AdamShard& states, StatePlane plane) {
  if (plane == StatePlane::kExpAvg) return states.exp_avg;
  if (plane == StatePlane::kExpAvgSq) return states.exp_avg_sq;
  if (states.compute_dtype == DType::kBF16) return states.lo;
  return states.master;
}

// The elements that so many bytes of a plane from element `first` on are.
int64_t count_elements(const TensorSpec& spec, StatePlane plane, int64_t first, size_t bytes) {
  const size_t element = element_bytes(spec, plane);
  const auto numel = static_cast<int64_t>(bytes / element);
  check(bytes % element == 0 && first >= 0 && first <= spec.numel && numel <= spec.numel - first,
        ErrorCode::kUsage,
        "tensor '{}' has {} elements of {} bytes, {} bytes from element {} on are no part of it",
        spec.name, spec.numel, element, bytes, first);
  return numel;
}

}  // namespace

bool TensorHomes::want_drives(std::span<const TensorSpec> specs) {
  return std::ranges::any_of(specs, &TensorDrives::hold);
}

int64_t TensorHomes::add(std::span<const TensorSpec> specs) {
  const auto wanting = std::ranges::find_if(specs, &TensorDrives::hold);
  check(wanting == specs.end() || drives_ != nullptr, ErrorCode::kUsage,
        "tensor '{}' is to have its states on drives, but no directory was given for them",
        wanting == specs.end() ? "" : wanting->name);
  const int64_t first = store_.add(specs);
  if (wanting == specs.end()) return first;
  try {
    drives_->add(first, specs);
  } catch (...) {
    for (int64_t index = first; index < store_.count(); ++index) store_.release(index);
    throw;
  }
  return first;
}

void TensorHomes::visit(int64_t index, int64_t first, int64_t numel, const TensorDrives::Use& use) {
  const TensorStore::Tensor& tensor = store_.at(index);
  if (on_drives(tensor)) {
    drives_->visit(index, tensor, first, numel, use);
  } else {
    use(run_of(whole(tensor), first, numel), first);
  }
}

// That of fp32 is the weights.
void TensorHomes::visit_master(int64_t index, const TensorDrives::Use& use) {
  const TensorStore::Tensor& tensor = store_.at(index);
  if (tensor.spec.dtype == DType::kF32 && !TensorDrives::hold_weights(tensor.spec)) {
    use(whole(tensor), 0);
  } else {
    visit(index, 0, tensor.spec.numel, use);
  }
}

void TensorHomes::adopt_weights(int64_t index, const void* weights) {
  const TensorStore::Tensor& tensor = store_.at(index);
  if (on_drives(tensor)) {
    drives_->adopt(index, tensor, weights);
  } else {
    orlop::adopt_weights(whole(tensor), weights);
  }
}

void TensorHomes::move_weights(int64_t index, void* weights) {
  store_.move_weights(index, weights);
  adopt_weights(index, weights);
}

void TensorHomes::read_master(int64_t index, std::span<float> values) {
  check_count(store_.at(index), values.size());
  visit_master(index, [&](const AdamShard& states, int64_t begin) {
    orlop::read_master(states, part_of(values, 0, states, begin));
    return false;
  });
}

void TensorHomes::write_master(int64_t index, std::span<const float> values) {
  check_count(store_.at(index), values.size());
  visit_master(index, [&](const AdamShard& states, int64_t begin) {
    orlop::write_master(states, part_of(values, 0, states, begin));
    return true;
  });
  if (TensorDrives::hold_weights(store_.at(index).spec)) settle();  // who fetches reads the drive
}

void TensorHomes::read_state(int64_t index, StatePlane plane, int64_t first,
                             std::span<std::byte> values) {
  const TensorSpec& spec = store_.at(index).spec;
  const int64_t numel = count_elements(spec, plane, first, values.size());
  visit(index, first, numel, [&](const AdamShard& states, int64_t begin) {
    const auto part = part_of(values, first, states, begin, element_bytes(spec, plane));
    if (!part.empty()) std::memcpy(part.data(), plane_of(states, plane), part.size());
    return false;
  });
}

void TensorHomes::write_state(int64_t index, StatePlane plane, int64_t first,
                              std::span<const std::byte> values) {
  const TensorSpec& spec = store_.at(index).spec;
  const int64_t numel = count_elements(spec, plane, first, values.size());
  visit(index, first, numel, [&](const AdamShard& states, int64_t begin) {
    const auto part = part_of(values, first, states, begin, element_bytes(spec, plane));
    void* const there = plane_of(states, plane);
    if (part.empty() || std::memcmp(there, part.data(), part.size()) == 0) return false;
    std::memcpy(there, part.data(), part.size());
    return true;
  });
}

int64_t TensorHomes::piece_numel(int64_t index, int64_t first) const {
  const TensorStore::Tensor& tensor = store_.at(index);
  check(first >= 0 && first <= tensor.spec.numel, ErrorCode::kUsage,
        "tensor '{}' has {} elements, a piece from element {} on is asked for", tensor.spec.name,
        tensor.spec.numel, first);
  if (!on_drives(tensor) || first == tensor.spec.numel) return tensor.spec.numel - first;
  return drives_->piece_numel(index, first);
}

std::vector<std::span<std::byte>> TensorHomes::ranges() const {
  std::vector<std::span<std::byte>> ranges;
  for (const auto& arena : store_.arenas()) {
    ranges.emplace_back(arena->memory.data(), arena->copied_bytes);
  }
  return ranges;
}

std::vector<TensorMemory> TensorHomes::memory_report() const {
  std::vector<TensorMemory> report;
  for (const auto& arena : store_.arenas()) {
    for (const PurposeBytes& entry : arena->memory.report()) {
      const auto known = std::ranges::find(report, entry.purpose, &TensorMemory::purpose);
      if (known == report.end()) {
        report.push_back({entry.purpose, entry.bytes});
      } else {
        known->bytes += entry.bytes;
      }
    }
  }
  if (drives_ != nullptr) report.push_back({"slots of drives", drives_->slot_memory()});
  return report;
}

}  // namespace orlop
