#include "model/transformer_block.h"

#include <algorithm>

#include "base/check.h"
#include "model/workspace.h"

namespace orlop {
namespace {

int64_t longest_sequence(std::span<const int32_t> cu_seqlens) {
  int64_t longest = 0;
  for (size_t i = 1; i < cu_seqlens.size(); ++i) {
    longest = std::max<int64_t>(longest, cu_seqlens[i] - cu_seqlens[i - 1]);
  }
  return longest;
}

NormStats take_stats(Workspace& workspace, const Norm& norm, int64_t rows) {
  NormStats stats;
  stats.rstd = workspace.take_floats(rows * norm.groups);
  if (norm.layer_norm()) stats.mean = workspace.take_floats(rows * norm.groups);
  return stats;
}

}  // namespace

// Regions of one call; some share memory, see the carve functions.
struct TransformerBlock::Buffers {
  NormStats attention_norm, mlp_norm, query_norm, key_norm;
  void* qkv = nullptr;  // (N, QKV) as projected
  void* qk = nullptr;   // normed and rotated queries and keys, rows QKV apart; may be qkv itself
  void* attention = nullptr;  // (N, Q)
  float* lse = nullptr;       // (heads, N)
  void* attention_workspace = nullptr;
  size_t attention_workspace_bytes = 0;

  void* attention_in = nullptr;  // (N, D) norm1(x)
  void* middle = nullptr;        // (N, D) m; in forward the block's output
  void* mlp_normed = nullptr;    // (N, D) norm2(m)
  void* mlp_in = nullptr;        // (N, A), then its gradient
  void* mlp_act = nullptr;       // (N, I), then its gradient
  void* mlp_result =
      nullptr;  // (N, D) forward: before the residual; backward: gradient of norm2(m)

  void* d_attention = nullptr;     // (N, Q)
  void* d_qkv = nullptr;           // (N, QKV)
  void* d_attention_in = nullptr;  // (N, D)
  void* backward_workspace = nullptr;
  size_t backward_workspace_bytes = 0;
};

TransformerBlock::TransformerBlock(const TransformerConfig& config, const FlatParamLayout& layout,
                                   DType dtype)
    : config_(config), dtype_(dtype) {
  const auto norm = [&](TensorRole weight, TensorRole bias) {
    Norm result;
    result.weight = operand_offset(layout, weight);
    result.bias = operand_offset(layout, bias);
    result.cols = result.stride = config.hidden;
    result.eps = config.norm_eps;
    return result;
  };
  const auto head_norm = [&](TensorRole weight, int64_t heads) {
    Norm result;
    result.weight = operand_offset(layout, weight);
    result.groups = heads;
    result.cols = config.head_dim;
    result.stride = config.qkv_width();
    result.eps = config.norm_eps;
    return result;
  };
  const auto linear = [&](TensorRole weight, TensorRole bias, int64_t in, int64_t out) {
    return Linear{operand_offset(layout, weight), operand_offset(layout, bias), in, out,
                  config.transposed_linear};
  };
  const int64_t mlp_width =
      config.activation == Activation::kSwiGlu ? 2 * config.intermediate : config.intermediate;
  attention_norm_ = norm(TensorRole::kAttentionNormWeight, TensorRole::kAttentionNormBias);
  mlp_norm_ = norm(TensorRole::kMlpNormWeight, TensorRole::kMlpNormBias);
  query_norm_ = head_norm(TensorRole::kQueryNormWeight, config.heads);
  key_norm_ = head_norm(TensorRole::kKeyNormWeight, config.kv_heads);
  qkv_ = linear(TensorRole::kQkvWeight, TensorRole::kQkvBias, config.hidden, config.qkv_width());
  attention_out_ = linear(TensorRole::kAttentionOutWeight, TensorRole::kAttentionOutBias,
                          config.q_width(), config.hidden);
  mlp_in_ = linear(TensorRole::kMlpInWeight, TensorRole::kMlpInBias, config.hidden, mlp_width);
  mlp_out_ = linear(TensorRole::kMlpOutWeight, TensorRole::kMlpOutBias, config.intermediate,
                    config.hidden);
}

size_t TransformerBlock::attention_bytes(const Ops& ops, const BatchShape& shape,
                                         bool backward) const {
  AttentionShape attention;
  attention.rows = shape.rows;
  attention.heads = config_.heads;
  attention.kv_heads = config_.kv_heads;
  attention.head_dim = config_.head_dim;
  attention.max_sequence = shape.max_sequence;
  attention.dtype = dtype_;
  attention.backward = backward;
  return ops.attention_workspace_bytes(attention);
}

// What attention's forward writes and its backward reads, but for the output.
TransformerBlock::Buffers TransformerBlock::carve_attention(Workspace& workspace,
                                                            int64_t rows) const {
  Buffers buffers;
  buffers.qkv = workspace.take(rows * qkv_.out, dtype_);
  buffers.qk = buffers.qkv;
  if (config_.qk_norm) {
    // A whole second (N, QKV): queries, keys and values must lie equally far apart.
    buffers.qk = workspace.take(rows * qkv_.out, dtype_);
    buffers.query_norm = take_stats(workspace, query_norm_, rows);
    buffers.key_norm = take_stats(workspace, key_norm_, rows);
  }
  buffers.lse = workspace.take_floats(rows * config_.heads);
  return buffers;
}

TransformerBlock::Buffers TransformerBlock::carve_forward(Workspace& workspace, const Ops& ops,
                                                          const BatchShape& shape) const {
  const int64_t rows = shape.rows;
  const NormStats stats = take_stats(workspace, attention_norm_, rows);
  // norm1(x), the attention's output, norm2(m) and the MLP's result: each is read before the next
  // is written.
  void* narrow = workspace.take(rows * std::max(config_.hidden, config_.q_width()), dtype_);
  const size_t overlay = workspace.mark();
  Buffers buffers = carve_attention(workspace, rows);
  buffers.attention_workspace_bytes = attention_bytes(ops, shape, false);
  buffers.attention_workspace = workspace.take_bytes(buffers.attention_workspace_bytes);

  workspace.rewind(overlay);
  buffers.mlp_in = workspace.take(rows * mlp_in_.out, dtype_);
  buffers.mlp_act = workspace.take(rows * config_.intermediate, dtype_);
  buffers.attention_norm = buffers.mlp_norm = stats;
  buffers.attention_in = buffers.attention = buffers.mlp_normed = buffers.mlp_result = narrow;
  return buffers;
}

TransformerBlock::Buffers TransformerBlock::carve_backward(Workspace& workspace, const Ops& ops,
                                                           const BatchShape& shape) const {
  const int64_t rows = shape.rows;
  Buffers buffers = carve_attention(workspace, rows);
  buffers.attention = workspace.take(rows * config_.q_width(), dtype_);
  buffers.attention_norm = take_stats(workspace, attention_norm_, rows);
  buffers.mlp_norm = take_stats(workspace, mlp_norm_, rows);
  const size_t overlay = workspace.mark();

  // Forward of attention. norm1(x) is dead before the attention operation starts.
  buffers.attention_workspace_bytes = attention_bytes(ops, shape, false);
  buffers.attention_workspace = workspace.take_bytes(buffers.attention_workspace_bytes);

  // MLP. norm2(m) lies where the activation is written once In has read it, and again where the
  // activation's gradient was; its own gradient replaces nothing that is still read.
  workspace.rewind(overlay);
  buffers.middle = workspace.take(rows * config_.hidden, dtype_);
  buffers.mlp_in = workspace.take(rows * mlp_in_.out, dtype_);
  buffers.mlp_act = workspace.take(rows * std::max(config_.intermediate, config_.hidden), dtype_);
  buffers.mlp_normed = buffers.mlp_result = buffers.mlp_act;

  // Backward of attention.
  workspace.rewind(overlay);
  buffers.d_qkv = workspace.take(rows * qkv_.out, dtype_);
  const size_t after_d_qkv = workspace.mark();
  buffers.d_attention = workspace.take(rows * config_.q_width(), dtype_);
  buffers.backward_workspace_bytes = attention_bytes(ops, shape, true);
  buffers.backward_workspace = workspace.take_bytes(buffers.backward_workspace_bytes);
  workspace.rewind(after_d_qkv);
  buffers.attention_in = workspace.take(rows * config_.hidden, dtype_);
  buffers.d_attention_in = workspace.take(rows * config_.hidden, dtype_);
  return buffers;
}

size_t TransformerBlock::workspace_bytes(const Ops& ops, const BatchShape& shape,
                                         bool backward) const {
  Workspace workspace(nullptr);
  if (backward) {
    carve_backward(workspace, ops, shape);
  } else {
    carve_forward(workspace, ops, shape);
  }
  return workspace.peak_bytes();
}

AttentionArgs TransformerBlock::attention_args(const BlockCall& call,
                                               const Buffers& buffers) const {
  AttentionArgs args;
  args.q = buffers.qk;
  args.k = element(buffers.qk, config_.q_width(), dtype_);
  args.v = element(buffers.qkv, config_.q_width() + config_.kv_width(), dtype_);
  args.out = buffers.attention;
  args.lse = buffers.lse;
  args.cu_seqlens = call.batch.cu_seqlens;
  args.cu_seqlens_host = call.batch.cu_seqlens_host;
  args.rows = call.batch.rows;
  args.heads = config_.heads;
  args.kv_heads = config_.kv_heads;
  args.head_dim = config_.head_dim;
  args.q_stride = args.kv_stride = qkv_.out;
  args.scale = config_.attention_scale();
  args.workspace = buffers.attention_workspace;
  args.workspace_bytes = buffers.attention_workspace_bytes;
  args.dtype = dtype_;
  return args;
}

void TransformerBlock::rotate(const LayerCall& layer, const BlockCall& call, void* qk,
                              bool inverse) {
  if (!config_.rope.enabled) return;
  ORLOP_INVARIANT(call.rope != nullptr);
  RopeArgs args;
  args.x = qk;
  args.positions = call.batch.positions;
  args.cos_sin = call.rope;
  args.rows = call.batch.rows;
  args.heads = config_.heads + config_.kv_heads;  // keys follow queries in every row
  args.head_dim = config_.head_dim;
  args.rotary_dim = config_.rope.rotary_dim;
  args.row_stride = qkv_.out;
  args.inverse = inverse;
  args.dtype = dtype_;
  layer.ops.rope(layer.queue, args);
}

void TransformerBlock::attention_forward(const LayerCall& layer, const BlockCall& call,
                                         const Buffers& buffers, const void* input) {
  const int64_t rows = call.batch.rows;
  attention_norm_.forward(layer, input, buffers.attention_in, buffers.attention_norm, rows);
  qkv_.forward(layer, buffers.attention_in, buffers.qkv, rows);
  if (config_.qk_norm) {
    const int64_t keys = config_.q_width();
    query_norm_.forward(layer, buffers.qkv, buffers.qk, buffers.query_norm, rows);
    key_norm_.forward(layer, element(buffers.qkv, keys, dtype_), element(buffers.qk, keys, dtype_),
                      buffers.key_norm, rows);
  }
  rotate(layer, call, buffers.qk, false);
  layer.ops.attention_forward(layer.queue, attention_args(call, buffers));
}

void TransformerBlock::mlp_forward(const LayerCall& layer, const Buffers& buffers, int64_t rows) {
  mlp_in_.forward(layer, buffers.mlp_normed, buffers.mlp_in, rows);
  ActivationArgs args;
  args.kind = config_.activation;
  args.in = buffers.mlp_in;
  args.out = buffers.mlp_act;
  args.rows = rows;
  args.width = config_.intermediate;
  args.dtype = dtype_;
  layer.ops.activation_forward(layer.queue, args);
}

void TransformerBlock::forward(const BlockCall& call, const void* input, void* output) {
  ORLOP_INVARIANT(input != output);
  const LayerCall layer(call, 0, dtype_);
  const int64_t rows = call.batch.rows;
  Workspace workspace(call.workspace);
  Buffers buffers =
      carve_forward(workspace, call.ops, {rows, longest_sequence(call.batch.cu_seqlens_host)});
  buffers.middle = output;

  attention_forward(layer, call, buffers, input);
  attention_out_.forward(layer, buffers.attention, buffers.middle, rows);
  mlp_norm_.add_forward(layer, buffers.middle, input, buffers.mlp_normed, buffers.mlp_norm, rows);
  mlp_forward(layer, buffers, rows);
  mlp_out_.forward(layer, buffers.mlp_act, buffers.mlp_result, rows);
  call.ops.add(call.queue, output, buffers.mlp_result, rows * config_.hidden, dtype_);
}

void TransformerBlock::mlp_backward(const LayerCall& layer, const Buffers& buffers, void* grad,
                                    int64_t rows) {
  mlp_out_.backward_weight(layer, buffers.mlp_act, grad, rows);
  mlp_out_.backward_input(layer, grad, buffers.mlp_act, rows);
  ActivationArgs args;
  args.kind = config_.activation;
  args.in = buffers.mlp_in;
  args.dout = buffers.mlp_act;
  args.din = buffers.mlp_in;
  args.rows = rows;
  args.width = config_.intermediate;
  args.dtype = dtype_;
  layer.ops.activation_backward(layer.queue, args);

  mlp_norm_.forward(layer, buffers.middle, buffers.mlp_normed, buffers.mlp_norm, rows);
  mlp_in_.backward_weight(layer, buffers.mlp_normed, buffers.mlp_in, rows);
  mlp_in_.backward_input(layer, buffers.mlp_in, buffers.mlp_result, rows);
  mlp_norm_.backward(layer,
                     {buffers.mlp_result, buffers.middle, grad, buffers.mlp_norm, true, rows});
}

void TransformerBlock::attention_backward(const LayerCall& layer, const BlockCall& call,
                                          const Buffers& buffers, const void* input, void* grad) {
  const int64_t rows = call.batch.rows;
  const int64_t keys = config_.q_width();
  const int64_t values = keys + config_.kv_width();
  attention_out_.backward_weight(layer, buffers.attention, grad, rows);
  attention_out_.backward_input(layer, grad, buffers.d_attention, rows);

  AttentionBackwardArgs args;
  args.forward = attention_args(call, buffers);
  args.forward.workspace = buffers.backward_workspace;
  args.forward.workspace_bytes = buffers.backward_workspace_bytes;
  args.dout = buffers.d_attention;
  args.dq = buffers.d_qkv;
  args.dk = element(buffers.d_qkv, keys, dtype_);
  args.dv = element(buffers.d_qkv, values, dtype_);
  layer.ops.attention_backward(layer.queue, args);

  rotate(layer, call, args.dq, true);
  if (config_.qk_norm) {
    query_norm_.backward(layer, {args.dq, buffers.qkv, args.dq, buffers.query_norm, false, rows});
    key_norm_.backward(layer, {args.dk, element(buffers.qkv, keys, dtype_), args.dk,
                               buffers.key_norm, false, rows});
  }

  attention_norm_.forward(layer, input, buffers.attention_in, buffers.attention_norm, rows);
  qkv_.backward_weight(layer, buffers.attention_in, buffers.d_qkv, rows);
  qkv_.backward_input(layer, buffers.d_qkv, buffers.d_attention_in, rows);
  attention_norm_.backward(
      layer, {buffers.d_attention_in, input, grad, buffers.attention_norm, true, rows});
}

void TransformerBlock::backward(const BlockCall& call, const void* input, void* grad) {
  const LayerCall layer(call, 0, dtype_);
  const int64_t rows = call.batch.rows;
  Workspace workspace(call.workspace);
  Buffers buffers =
      carve_backward(workspace, call.ops, {rows, longest_sequence(call.batch.cu_seqlens_host)});

  attention_forward(layer, call, buffers, input);
  attention_out_.forward(layer, buffers.attention, buffers.middle, rows);
  mlp_norm_.add_forward(layer, buffers.middle, input, buffers.mlp_normed, buffers.mlp_norm, rows);
  mlp_forward(layer, buffers, rows);
  mlp_backward(layer, buffers, grad, rows);
  attention_backward(layer, call, buffers, input, grad);
}

}  // namespace orlop
