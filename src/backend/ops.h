#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "orlop/cpu_adam.h"
#include "orlop/types.h"

namespace orlop {

class Queue;

// Operations of a transformer block on one device. Every call only issues work on `queue`.
//
// Conventions: matrices are row-major; N tokens of a micro-batch are the rows of an activation;
// `dtype` is the compute dtype of activations and weights (fp32, bf16 or fp16), sums run in fp32 or
// wider; gradients of weights accumulate into fp32 (`+=`), in a fixed order, without atomics.
// Strides count elements. Pointers are device memory unless a comment says host. No operation
// allocates.

// c[m, n] (+)= op(a)[m, k] * op(b)[k, n] + bias[n]
struct MatmulArgs {
  const void* a = nullptr;     // (m, k), or (k, m) when trans_a
  const void* b = nullptr;     // (k, n), or (n, k) when trans_b
  void* c = nullptr;           // (m, n) of out_dtype
  const void* bias = nullptr;  // (n) of in_dtype, or null
  int64_t m = 0, n = 0, k = 0;
  int64_t lda = 0, ldb = 0, ldc = 0;  // elements between rows as stored
  bool trans_a = false, trans_b = false;
  bool accumulate = false;  // add to c, which must then be fp32
  DType in_dtype = DType::kF32;
  DType out_dtype = DType::kF32;
};

// RMSNorm (mean == null) or LayerNorm over groups of `cols` elements. Element (r, g, c) of x lies
// at x + r * x_stride + g * cols + c; y likewise with y_stride. groups > 1 is QK norm: one group
// per head.
//   rstd, mean  (rows * groups) fp32, written by forward, read by backward
//   residual    when set, forward first does x += residual (same stride as x) and keeps the sum in
//   x
struct NormArgs {
  void* x = nullptr;
  const void* residual = nullptr;
  const void* weight = nullptr;  // (cols)
  const void* bias = nullptr;    // (cols), LayerNorm only
  void* y = nullptr;
  float* rstd = nullptr;
  float* mean = nullptr;
  int64_t rows = 0, groups = 1, cols = 0, x_stride = 0, y_stride = 0;
  float eps = 1e-5f;
  DType dtype = DType::kF32;
};

//   dx      (+)= gradient with respect to x (strides as x_stride); `accumulate_dx` adds. May alias
//   dy. dweight (cols) fp32 +=, dbias (cols) fp32 +=
struct NormBackwardArgs {
  const void* dy = nullptr;  // strides as y_stride
  const void* x = nullptr;   // the normalised input (after the residual was added)
  const void* weight = nullptr;
  const float* rstd = nullptr;
  const float* mean = nullptr;  // null: RMSNorm
  void* dx = nullptr;
  float* dweight = nullptr;
  float* dbias = nullptr;
  bool accumulate_dx = false;
  int64_t rows = 0, groups = 1, cols = 0, x_stride = 0, y_stride = 0;
  DType dtype = DType::kF32;
};

// Rotates, in place, the two halves of every head (the HF layout): pairs (c, c + rotary_dim/2).
//   x         (rows, heads, head_dim) with `row_stride` elements between rows
//   positions (rows) int32
//   cos_sin   (max_position, rotary_dim / 2, 2) fp32, scaling included
// `inverse` rotates back: the backward pass.
struct RopeArgs {
  void* x = nullptr;
  const int32_t* positions = nullptr;
  const float* cos_sin = nullptr;
  int64_t rows = 0, heads = 0, head_dim = 0, rotary_dim = 0, row_stride = 0;
  bool inverse = false;
  DType dtype = DType::kF32;
};

// Causal grouped-query attention over packed sequences: tokens attend within their own sequence
// only.
//   q (rows, heads, head_dim), k and v (rows, kv_heads, head_dim), with strides between rows
//   out (rows, heads, head_dim) dense, lse (heads, rows) fp32: log of the softmax denominator
//   cu_seqlens (sequences + 1) int32 row offsets, on the device and, the same, on the host
struct AttentionArgs {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  void* out = nullptr;
  float* lse = nullptr;
  const int32_t* cu_seqlens = nullptr;
  std::span<const int32_t> cu_seqlens_host;
  int64_t rows = 0, heads = 0, kv_heads = 0, head_dim = 0;
  int64_t q_stride = 0, kv_stride = 0;
  float scale = 1.0f;
  void* workspace = nullptr;  // attention_workspace_bytes()
  size_t workspace_bytes = 0;
  DType dtype = DType::kF32;
};

// dq, dk, dv have the strides of q, k, v and are overwritten.
struct AttentionBackwardArgs {
  AttentionArgs forward;
  const void* dout = nullptr;  // (rows, heads, head_dim) dense
  void* dq = nullptr;
  void* dk = nullptr;
  void* dv = nullptr;
};

// What a planner must reserve for one attention call.
struct AttentionShape {
  int64_t rows = 0, heads = 0, kv_heads = 0, head_dim = 0, max_sequence = 0;
  DType dtype = DType::kF32;
  bool backward = false;
};

enum class Activation : uint8_t {
  kSwiGlu,    // in (rows, 2 * width): silu(in[:, :width]) * in[:, width:]
  kGeluTanh,  // in (rows, width), the tanh form ("gelu_new", "gelu_pytorch_tanh")
  kGelu,      // in (rows, width), the erf form
};

struct ActivationArgs {
  Activation kind = Activation::kSwiGlu;
  const void* in = nullptr;
  void* out = nullptr;         // (rows, width); forward
  const void* dout = nullptr;  // (rows, width); backward
  void* din = nullptr;         // like `in`; backward; may alias `in`
  int64_t rows = 0, width = 0;
  DType dtype = DType::kF32;
};

// out[r] = table[tokens[r]] (+ positions_table[positions[r]])
struct EmbeddingArgs {
  const int32_t* tokens = nullptr;
  const void* table = nullptr;            // (vocab, cols)
  const int32_t* positions = nullptr;     // with positions_table
  const void* positions_table = nullptr;  // (max_position, cols), or null
  void* out = nullptr;                    // (rows, cols)
  int64_t rows = 0, cols = 0, vocab = 0;
  DType dtype = DType::kF32;
};

// dtable[id] += sum of dy over the rows whose index is id, in row order. The host sorts the rows by
// index once: run s covers sorted_rows[run_begin[s] .. run_begin[s + 1]) and has index
// run_index[s].
struct EmbeddingBackwardArgs {
  const void* dy = nullptr;              // (rows, cols)
  float* dtable = nullptr;               // (vocab, cols) fp32
  const int32_t* sorted_rows = nullptr;  // (rows)
  const int32_t* run_begin = nullptr;    // (runs + 1)
  const int32_t* run_index = nullptr;    // (runs)
  int64_t runs = 0, rows = 0, cols = 0;
  DType dtype = DType::kF32;
};

// Softmax cross-entropy over rows of logits; labels below 0 are ignored.
//   logits  (rows, vocab); overwritten by their gradient, scale * (softmax - one_hot), when
//           write_gradient is set (zero for ignored rows)
//   loss    (rows) fp32: -log softmax[label], 0 for ignored rows
struct CrossEntropyArgs {
  void* logits = nullptr;
  const int32_t* labels = nullptr;
  float* loss = nullptr;
  const float* scale =
      nullptr;  // one fp32 in device memory: loss_scale / labelled tokens of the step
  int64_t rows = 0, vocab = 0;
  bool write_gradient = true;
  DType dtype = DType::kF32;
};

// One FlatParam's gradient, rounded to what the optimizer reads, and its share of the global norm.
//   rounded      (numel) of out_dtype, round to nearest even; may be null when out_dtype is fp32:
//   the
//                gradient then stays where it is
//   square_sum   fp64, overwritten: sum of squares of the rounded gradient in the fixed order of
//                cpu_adam/grad_norm.h; the same bits on every backend
//   first_nonfinite  int64, overwritten: index of the first NaN or Inf, or -1
//   scratch      grad_norm_scratch_bytes(numel)
struct RoundGradArgs {
  const float* grad = nullptr;
  void* rounded = nullptr;
  double* square_sum = nullptr;
  int64_t* first_nonfinite = nullptr;
  void* scratch = nullptr;
  int64_t numel = 0;
  DType out_dtype = DType::kF32;
};

// What the update of every shard reads; computed once per step from all square sums, in the order
// of FlatParams, those of one FlatParam in the order of ranks.
struct StepScalars {
  double grad_norm = 0;          // of the unscaled gradient, before clipping
  float grad_scale = 1;          // clip / loss_scale: one fp32 multiply on every gradient element
  int32_t skip = 0;              // 1: a gradient is not finite, nothing is updated
  int64_t nonfinite_param = -1;  // first FlatParam with a NaN or Inf
  int64_t nonfinite_index = -1;  // element in the part of it that ...
  int64_t nonfinite_rank = -1;   // ... this rank has: the first with a NaN or Inf
};

struct FinishNormArgs {
  const double* square_sums = nullptr;       // (ranks, params)
  const int64_t* first_nonfinite = nullptr;  // (ranks, params)
  int64_t params = 0;
  int64_t ranks = 1;
  int64_t rank_stride = 0;  // elements between the rows of two ranks, in both
  float max_norm = 0;       // 0: no clipping; else clip = min(1, max_norm / (norm + 1e-6))
  float loss_scale = 1;     // gradients are multiplied by it
  StepScalars* out = nullptr;
};

// One AdamW step over `numel` elements in device memory; planes and formula as in cpu_adam/adam.h.
struct DeviceAdamArgs {
  AdamShard shard;  // planes in device memory; grad_dtype is compute_dtype
  AdamHyper hyper;
  const StepScalars* scalars = nullptr;  // device memory; skip leaves every bit as it is
};

class Ops {
 public:
  virtual ~Ops() = default;

  virtual void matmul(Queue& queue, const MatmulArgs& args) = 0;
  // dbias (n) fp32 += column sums of dy (m, n)
  virtual void bias_backward(Queue& queue, const void* dy, float* dbias, int64_t m, int64_t n,
                             DType dtype) = 0;
  virtual void norm_forward(Queue& queue, const NormArgs& args) = 0;
  virtual void norm_backward(Queue& queue, const NormBackwardArgs& args) = 0;
  virtual void rope(Queue& queue, const RopeArgs& args) = 0;
  virtual size_t attention_workspace_bytes(const AttentionShape& shape) const = 0;
  virtual void attention_forward(Queue& queue, const AttentionArgs& args) = 0;
  virtual void attention_backward(Queue& queue, const AttentionBackwardArgs& args) = 0;
  virtual void activation_forward(Queue& queue, const ActivationArgs& args) = 0;
  virtual void activation_backward(Queue& queue, const ActivationArgs& args) = 0;
  virtual void embedding_forward(Queue& queue, const EmbeddingArgs& args) = 0;
  virtual void embedding_backward(Queue& queue, const EmbeddingBackwardArgs& args) = 0;
  virtual void cross_entropy(Queue& queue, const CrossEntropyArgs& args) = 0;
  // to += from, (numel) of dtype
  virtual void add(Queue& queue, void* to, const void* from, int64_t numel, DType dtype) = 0;
  // to (numel) of dtype = from (numel) fp32, round to nearest even
  virtual void narrow(Queue& queue, const float* from, void* to, int64_t numel, DType dtype) = 0;
  // to (numel) fp32 = sum of the rows of from (rows, numel) of dtype, in fp32, from the first row
  // on
  virtual void sum_rows(Queue& queue, const void* from, float* to, int64_t rows, int64_t numel,
                        DType dtype) = 0;
  virtual size_t grad_norm_scratch_bytes(int64_t numel) const = 0;
  virtual void round_grad(Queue& queue, const RoundGradArgs& args) = 0;
  virtual void finish_norm(Queue& queue, const FinishNormArgs& args) = 0;
  virtual void device_adam(Queue& queue, const DeviceAdamArgs& args) = 0;
  // Logits rows per LM-head chunk: a function of shape only, so that the bits do not depend on
  // budgets.
  virtual int64_t head_chunk_rows(int64_t vocab, DType dtype) const = 0;
};

}  // namespace orlop
