#pragma once

#include <cstdint>
#include <vector>

#include "backend/ops.h"
#include "test_device.h"

// The mathematics of the operations in fp64, dense and without strides; independent of every
// implementation. ops_reference_test.cc checks each gradient here by finite differences.
namespace orlop::test {

// op(a)[m, k] * op(b)[k, n]; an operand that is transposed is given as it is stored.
Values reference_matmul(const Values& a, const Values& b, int64_t m, int64_t n, int64_t k,
                        bool trans_a, bool trans_b);

struct NormShape {
  int64_t rows, cols;
  double eps;
  bool center;  // LayerNorm
};
struct NormResult {
  Values y, rstd, mean;
};
NormResult reference_norm(const NormShape& shape, const Values& x, const Values& weight,
                          const Values& bias);
struct NormGradients {
  Values dx, dweight, dbias;
};
NormGradients reference_norm_backward(const NormShape& shape, const Values& x, const Values& weight,
                                      const Values& dy);

struct AttentionCase {
  std::vector<int32_t> cu_seqlens;
  int64_t heads, kv_heads, head_dim;
  double scale;
  int64_t rows() const { return cu_seqlens.back(); }
};
struct AttentionResult {
  Values out;  // (rows, heads, head_dim)
  Values lse;  // (heads, rows)
};
AttentionResult reference_attention(const AttentionCase& shape, const Values& q, const Values& k,
                                    const Values& v);
struct AttentionGradients {
  Values dq, dk, dv;
};
AttentionGradients reference_attention_backward(const AttentionCase& shape, const Values& q,
                                                const Values& k, const Values& v,
                                                const Values& dout);

// (rows, heads, head_dim) rotated by the angles of cos_sin (positions, rotary_dim / 2, 2).
Values reference_rope(const Values& x, const std::vector<int32_t>& positions, const Values& cos_sin,
                      int64_t heads, int64_t head_dim, int64_t rotary_dim);

Values reference_activation(Activation kind, const Values& in, int64_t rows, int64_t width);
Values reference_activation_backward(Activation kind, const Values& in, const Values& dout,
                                     int64_t rows, int64_t width);

struct CrossEntropyResult {
  Values loss;      // (rows)
  Values gradient;  // (rows, vocab) of scale * sum of losses
};
CrossEntropyResult reference_cross_entropy(const Values& logits, const std::vector<int32_t>& labels,
                                           int64_t vocab, double scale);

}  // namespace orlop::test
