#pragma once

#include "model/block.h"
#include "model/layers.h"

namespace orlop {

class Workspace;

// One pre-norm decoder layer:
//   m = x + O(attention(norm1(x)))          attention: QKV, per-head norm (Qwen3), RoPE, causal GQA
//   y = m + Down(activation(In(norm2(m))))  In is gate | up, or GPT-2's c_fc
// Backward recomputes everything but y from x.
//
// Workspace per row, in elements of the compute dtype (N rows, D hidden, Q = heads * head_dim,
// KV = kv_heads * head_dim, QKV = Q + 2 KV, I intermediate, A = 2 I with SwiGLU, else I), beside
// the fp32 statistics (lse: heads; norms: 1 or 2 each) and the attention operation's own workspace
// Wf, Wb:
//   kept      QKV + Q               (+ QKV with per-head norm: raw and normed)
//   forward   max(D, Q) + max(kept - Q + Wf, A + I)
//   backward  kept + max(Wf, D + A + max(I, D), QKV + max(Q + Wb, 2 D))
// Normed inputs are computed again rather than kept: a norm costs one pass over (N, D).
class TransformerBlock final : public Block {
 public:
  TransformerBlock(const TransformerConfig& config, const FlatParamLayout& layout, DType dtype);

  size_t workspace_bytes(const Ops& ops, const BatchShape& shape, bool backward) const override;
  void forward(const BlockCall& call, const void* input, void* output) override;
  void backward(const BlockCall& call, const void* input, void* grad) override;

 private:
  struct Buffers;
  Buffers carve_attention(Workspace& workspace, int64_t rows) const;
  Buffers carve_forward(Workspace& workspace, const Ops& ops, const BatchShape& shape) const;
  Buffers carve_backward(Workspace& workspace, const Ops& ops, const BatchShape& shape) const;
  size_t attention_bytes(const Ops& ops, const BatchShape& shape, bool backward) const;

  // From x to the output of attention, before the O projection.
  void attention_forward(const LayerCall& layer, const BlockCall& call, const Buffers& buffers,
                         const void* input);
  // From m (in `middle`, after the residual) to the activation's output.
  void mlp_forward(const LayerCall& layer, const Buffers& buffers, int64_t rows);
  // Turns `grad` from the gradient of y into the gradient of m.
  void mlp_backward(const LayerCall& layer, const Buffers& buffers, void* grad, int64_t rows);
  // Turns `grad` from the gradient of m into the gradient of x.
  void attention_backward(const LayerCall& layer, const BlockCall& call, const Buffers& buffers,
                          const void* input, void* grad);
  void rotate(const LayerCall& layer, const BlockCall& call, void* qk, bool inverse);
  AttentionArgs attention_args(const BlockCall& call, const Buffers& buffers) const;

  TransformerConfig config_;
  DType dtype_;
  Norm attention_norm_, mlp_norm_;
  Norm query_norm_, key_norm_;  // Qwen3
  Linear qkv_, attention_out_, mlp_in_, mlp_out_;
};

}  // namespace orlop
