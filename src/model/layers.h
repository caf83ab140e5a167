#pragma once

#include <cstdint>

#include "model/block.h"
#include "model/param_layout.h"

namespace orlop {

// One FlatParam as the layers of a block see it during one call.
struct LayerCall {
  LayerCall(const BlockCall& call, size_t flat_param, DType dtype);

  const void* weight(int64_t offset) const;  // null for offset kAbsent
  float* grad(int64_t offset) const;         // likewise

  static constexpr int64_t kAbsent = -1;

  Ops& ops;
  Queue& queue;
  const void* param;
  float* grad_base;
  DType dtype;
};

// Where an operand starts in its FlatParam, in elements; LayerCall::kAbsent when it has none.
int64_t operand_offset(const FlatParamLayout& layout, TensorRole role);

// y (rows, out) = x (rows, in) W^T + b. W is stored (out, in), or (in, out) when `stored_in_out`.
struct Linear {
  int64_t weight = LayerCall::kAbsent;
  int64_t bias = LayerCall::kAbsent;
  int64_t in = 0;
  int64_t out = 0;
  bool stored_in_out = false;

  void forward(const LayerCall& call, const void* x, void* y, int64_t rows) const;
  // dW += dy^T x, db += column sums of dy
  void backward_weight(const LayerCall& call, const void* x, const void* dy, int64_t rows) const;
  // dx = dy W
  void backward_input(const LayerCall& call, const void* dy, void* dx, int64_t rows) const;
};

// fp32 statistics of a norm, one per row and group.
struct NormStats {
  float* rstd = nullptr;
  float* mean = nullptr;  // LayerNorm only
};

// RMSNorm or LayerNorm of `groups` neighbouring groups of `cols` elements in rows `stride` apart.
struct Norm {
  int64_t weight = LayerCall::kAbsent;
  int64_t bias = LayerCall::kAbsent;
  int64_t groups = 1;
  int64_t cols = 0;
  int64_t stride = 0;
  float eps = 1e-5f;

  bool layer_norm() const { return bias != LayerCall::kAbsent; }

  void forward(const LayerCall& call, const void* x, void* y, NormStats stats, int64_t rows) const;
  // x += residual, then y = norm(x)
  void add_forward(const LayerCall& call, void* x, const void* residual, void* y, NormStats stats,
                   int64_t rows) const;
  struct Backward {
    const void* dy = nullptr;
    const void* x = nullptr;
    void* dx = nullptr;
    NormStats stats;
    bool accumulate_dx = false;
    int64_t rows = 0;
  };
  void backward(const LayerCall& call, const Backward& args) const;
};

}  // namespace orlop
