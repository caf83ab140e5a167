#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "orlop/types.h"

namespace orlop {

// A tensor in memory that someone else owns: row-major, without gaps.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;

  int64_t numel() const {
    int64_t product = 1;
    for (const int64_t dim : shape) product *= dim;
    return product;
  }
  size_t bytes() const { return static_cast<size_t>(numel()) * dtype_bytes(dtype); }
  std::span<std::byte> span() const { return {static_cast<std::byte*>(data), bytes()}; }
};

}  // namespace orlop
