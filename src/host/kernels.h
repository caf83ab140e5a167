#pragma once

#include <cstdint>

// The arithmetic of the host operations for one element type and one instruction set. Every
// function works on one row, or one block of attention, on the calling thread; who works on which
// row is the caller's matter, so the bits never depend on the number of threads. `void*` elements
// are of the table's type, sums run in fp32 (reference: fp64) and results are rounded once, to
// nearest even.
//
// Plain declarations only: files compiled for a special instruction set include this header, and
// code that a header carries inline could leave such instructions in ordinary files.
namespace orlop::host {

// RMSNorm, or LayerNorm when `center`. Forward writes rstd and mean, backward reads them.
struct NormRow {
  void* x;               // x += residual first, when set
  const void* residual;  // or null
  const void* weight;
  const void* bias;  // or null
  void* y;
  int64_t cols;
  float eps;
  bool center;
  float rstd;
  float mean;
};

struct NormRowBackward {
  const void* dy;
  const void* x;
  const void* weight;
  void* dx;        // may be dy
  float* dweight;  // (cols) +=
  float* dbias;    // (cols) +=, or null
  int64_t cols;
  bool center;
  bool accumulate_dx;
  float rstd;
  float mean;
};

struct RopeRow {
  void* x;               // (heads, head_dim)
  const float* cos_sin;  // (rotary_dim / 2, 2)
  int64_t heads;
  int64_t head_dim;
  int64_t rotary_dim;
  bool inverse;
};

struct CrossEntropyRow {
  void* logits;  // (vocab); overwritten by the gradient when write_gradient
  int64_t vocab;
  int64_t label;  // below 0: ignored
  float scale;
  bool write_gradient;
};

// One query head of one sequence with its key and value head. Strides count elements between rows.
struct AttentionHead {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* lse;  // (length)
  int64_t length;
  int64_t head_dim;
  int64_t q_stride;
  int64_t kv_stride;
  int64_t out_stride;
  float scale;
};

struct AttentionHeadBackward {
  AttentionHead forward;
  const void* dout;  // out_stride
  void* dq;          // q_stride
  float* dk;         // (length, head_dim) with partial_stride: this query head's share
  float* dv;         // likewise
  int64_t partial_stride;
};

// Query rows that one call of attention_forward handles.
inline constexpr int64_t kAttentionBlock = 64;

struct Kernels {
  void (*widen)(const void* from, float* to, int64_t n);
  void (*narrow)(const float* from, void* to, int64_t n);
  void (*add)(void* to, const void* from, int64_t n);              // to += from
  void (*accumulate)(float* to, const void* from, int64_t n);      // to += from
  void (*sum)(const void* a, const void* b, void* to, int64_t n);  // to = a + b
  void (*norm_forward)(NormRow& row);
  void (*norm_backward)(const NormRowBackward& row);
  void (*rope)(const RopeRow& row);
  void (*swiglu)(const void* in, void* out, int64_t width);
  void (*swiglu_backward)(const void* in, const void* dout, void* din, int64_t width);
  void (*gelu_tanh)(const void* in, void* out, int64_t width);
  void (*gelu_tanh_backward)(const void* in, const void* dout, void* din, int64_t width);
  void (*gelu)(const void* in, void* out, int64_t width);
  void (*gelu_backward)(const void* in, const void* dout, void* din, int64_t width);
  float (*cross_entropy)(const CrossEntropyRow& row);  // the loss
  // Rows block * kAttentionBlock and following; scratch of attention_scratch() floats, 64-byte
  // aligned.
  void (*attention_forward)(const AttentionHead& head, int64_t block, float* scratch);
  void (*attention_backward)(const AttentionHeadBackward& head, float* scratch);
  int64_t (*attention_scratch)(int64_t head_dim, int64_t max_length, bool backward);
};

// A dense block product in fp32: c[m, n] (+)= a[m, k] * b[k, n]; element (i, j) of a lies at
// a + i * a_row + j * a_col; n is a multiple of 16.
struct BlockProduct {
  const float* a;
  const float* b;
  float* c;
  int64_t m, n, k;
  int64_t a_row, a_col, ldb, ldc;
  bool accumulate;
};

struct KernelSet {
  Kernels f32;
  Kernels f16;
  Kernels bf16;
  void (*block_product)(const BlockProduct& product);
};

extern const KernelSet kBaselineKernels;
extern const KernelSet kAvx2Kernels;
extern const KernelSet kAvx512Kernels;
extern const KernelSet kReferenceKernels;

}  // namespace orlop::host
