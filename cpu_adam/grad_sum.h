#pragma once

#include <cstdint>

#include "orlop/cpu_adam.h"

namespace orlop {

enum class SumStart : uint8_t { kKeep, kStart, kAdd };

// One pass over a gradient and the fp32 sum of micro-batches that it belongs to, both of `numel`
// elements. Element by element: the sum stays, becomes the gradient or grows by it; then, with
// `round`, the gradient becomes the sum, rounded to nearest even. The same bits for every
// instruction set and thread count.
struct GradSum {
  void* grad = nullptr;
  DType dtype = DType::kBF16;  // of the gradient: kF32, kBF16 or kF16
  float* sum = nullptr;
  int64_t numel = 0;
  SumStart start = SumStart::kAdd;
  bool round = false;
};

// On `threads` OpenMP threads. With `round` it returns what grad_square_sum() would of the rounded
// gradient, and scratch holds ceil(numel / kNormChunk) doubles, overwritten; else scratch may be
// null. Throws Error(kUsage).
SquareSum sum_gradient(const GradSum& work, double* scratch, int threads);

}  // namespace orlop
