#pragma once

#include <cstddef>
#include <cstdint>

#include "base/half.h"
#include "orlop/types.h"

namespace orlop::host {

// Element types of ordinary files: load() widens to fp32, store() rounds once from fp32.
struct Float32 {
  using Storage = float;
  static float load(float value) { return value; }
  static float store(float value) { return value; }
};
struct Float16 {
  using Storage = uint16_t;
  static float load(uint16_t value) { return fp16_to_float(value); }
  static uint16_t store(float value) { return float_to_fp16(value); }
};
struct BFloat16 {
  using Storage = uint16_t;
  static float load(uint16_t value) { return bf16_to_float(value); }
  static uint16_t store(float value) { return float_to_bf16(value); }
};

// Calls visit(type) with the element type of a compute dtype.
template <typename Visit>
decltype(auto) with_element_type(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::kF16:
      return visit(Float16{});
    case DType::kBF16:
      return visit(BFloat16{});
    default:
      return visit(Float32{});
  }
}

// Address of element `index`.
inline void* at(void* base, int64_t index, DType dtype) {
  return static_cast<std::byte*>(base) + index * static_cast<int64_t>(dtype_bytes(dtype));
}
inline const void* at(const void* base, int64_t index, DType dtype) {
  return static_cast<const std::byte*>(base) + index * static_cast<int64_t>(dtype_bytes(dtype));
}

}  // namespace orlop::host
