#include "model/layers.h"

#include "base/check.h"
#include "model/workspace.h"

namespace orlop {

LayerCall::LayerCall(const BlockCall& call, size_t flat_param, DType call_dtype)
    : ops(call.ops), queue(call.queue), param(nullptr), grad_base(nullptr), dtype(call_dtype) {
  ORLOP_INVARIANT(flat_param < call.params.size());
  ORLOP_INVARIANT(call.grads.empty() || call.grads.size() == call.params.size());
  param = call.params[flat_param];
  if (!call.grads.empty()) grad_base = call.grads[flat_param];
}

const void* LayerCall::weight(int64_t offset) const {
  return offset == kAbsent ? nullptr : element(param, offset, dtype);
}

float* LayerCall::grad(int64_t offset) const {
  ORLOP_INVARIANT(grad_base != nullptr);
  return offset == kAbsent ? nullptr : grad_base + offset;
}

int64_t operand_offset(const FlatParamLayout& layout, TensorRole role) {
  const Segment* segment = layout.find(role);
  return segment == nullptr ? LayerCall::kAbsent : segment->offset;
}

void Linear::forward(const LayerCall& call, const void* x, void* y, int64_t rows) const {
  MatmulArgs args;
  args.a = x;
  args.b = call.weight(weight);
  args.c = y;
  args.bias = call.weight(bias);
  args.m = rows;
  args.n = out;
  args.k = in;
  args.lda = in;
  args.ldb = stored_in_out ? out : in;
  args.ldc = out;
  args.trans_b = !stored_in_out;
  args.in_dtype = args.out_dtype = call.dtype;
  call.ops.matmul(call.queue, args);
}

void Linear::backward_weight(const LayerCall& call, const void* x, const void* dy,
                             int64_t rows) const {
  MatmulArgs args;
  args.a = stored_in_out ? x : dy;
  args.b = stored_in_out ? dy : x;
  args.c = call.grad(weight);
  args.m = args.lda = stored_in_out ? in : out;
  args.n = args.ldb = args.ldc = stored_in_out ? out : in;
  args.k = rows;
  args.trans_a = true;
  args.accumulate = true;
  args.in_dtype = call.dtype;
  args.out_dtype = DType::kF32;
  call.ops.matmul(call.queue, args);
  if (bias != LayerCall::kAbsent) {
    call.ops.bias_backward(call.queue, dy, call.grad(bias), rows, out, call.dtype);
  }
}

void Linear::backward_input(const LayerCall& call, const void* dy, void* dx, int64_t rows) const {
  MatmulArgs args;
  args.a = dy;
  args.b = call.weight(weight);
  args.c = dx;
  args.m = rows;
  args.n = in;
  args.k = out;
  args.lda = out;
  args.ldb = stored_in_out ? out : in;
  args.ldc = in;
  args.trans_b = stored_in_out;
  args.in_dtype = args.out_dtype = call.dtype;
  call.ops.matmul(call.queue, args);
}

void Norm::forward(const LayerCall& call, const void* x, void* y, NormStats stats,
                   int64_t rows) const {
  // Without a residual the operation only reads x.
  add_forward(call, const_cast<void*>(x), nullptr, y, stats, rows);
}

void Norm::add_forward(const LayerCall& call, void* x, const void* residual, void* y,
                       NormStats stats, int64_t rows) const {
  NormArgs args;
  args.x = x;
  args.residual = residual;
  args.weight = call.weight(weight);
  args.bias = call.weight(bias);
  args.y = y;
  args.rstd = stats.rstd;
  args.mean = stats.mean;
  args.rows = rows;
  args.groups = groups;
  args.cols = cols;
  args.x_stride = args.y_stride = stride;
  args.eps = eps;
  args.dtype = call.dtype;
  call.ops.norm_forward(call.queue, args);
}

void Norm::backward(const LayerCall& call, const Backward& backward) const {
  NormBackwardArgs args;
  args.dy = backward.dy;
  args.x = backward.x;
  args.weight = call.weight(weight);
  args.rstd = backward.stats.rstd;
  args.mean = backward.stats.mean;
  args.dx = backward.dx;
  args.dweight = call.grad(weight);
  args.dbias = call.grad(bias);
  args.accumulate_dx = backward.accumulate_dx;
  args.rows = backward.rows;
  args.groups = groups;
  args.cols = cols;
  args.x_stride = args.y_stride = stride;
  args.dtype = call.dtype;
  call.ops.norm_backward(call.queue, args);
}

}  // namespace orlop
