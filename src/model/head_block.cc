#include "model/head_block.h"

#include <algorithm>

#include "base/check.h"
#include "model/workspace.h"

namespace orlop {
namespace {

NormStats stats_from(const NormStats& stats, int64_t row) {
  return {stats.rstd + row, stats.mean == nullptr ? nullptr : stats.mean + row};
}

}  // namespace

HeadBlock::HeadBlock(const TransformerConfig& config, const ModelLayout& layout,
                     const BlockLayout& block, DType dtype)
    : dtype_(dtype) {
  const auto flat = [&](size_t i) -> const FlatParamLayout& {
    return layout.flat_params[static_cast<size_t>(block.flat_params[i])];
  };
  norm_.weight = operand_offset(flat(0), TensorRole::kFinalNormWeight);
  norm_.bias = operand_offset(flat(0), TensorRole::kFinalNormBias);
  norm_.cols = norm_.stride = config.hidden;
  norm_.eps = config.norm_eps;

  logits_param_ = config.tied_embeddings ? 1 : 0;
  logits_.weight =
      operand_offset(flat(logits_param_),
                     config.tied_embeddings ? TensorRole::kTokenTable : TensorRole::kLogitsWeight);
  logits_.in = config.hidden;
  logits_.out = config.vocab_size;
}

HeadBlock::Buffers HeadBlock::carve(Workspace& workspace, const Ops& ops, int64_t rows) const {
  const int64_t chunk = std::min(rows, ops.head_chunk_rows(logits_.out, dtype_));
  Buffers buffers;
  buffers.stats.rstd = workspace.take_floats(rows);
  if (norm_.layer_norm()) buffers.stats.mean = workspace.take_floats(rows);
  buffers.hidden = workspace.take(chunk * logits_.in, dtype_);
  buffers.logits = workspace.take(chunk * logits_.out, dtype_);
  return buffers;
}

size_t HeadBlock::workspace_bytes(const Ops& ops, const BatchShape& shape, bool) const {
  Workspace workspace(nullptr);
  carve(workspace, ops, shape.rows);
  return workspace.peak_bytes();
}

void HeadBlock::run_chunks(const BlockCall& call, const Buffers& buffers, const void* input,
                           void* grad) {
  const LayerCall own(call, 0, dtype_);
  const LayerCall table(call, logits_param_, dtype_);
  const int64_t chunk = call.ops.head_chunk_rows(logits_.out, dtype_);
  for (int64_t row = 0; row < call.batch.rows; row += chunk) {
    const int64_t rows = std::min(chunk, call.batch.rows - row);
    norm_.forward(own, element(input, row * logits_.in, dtype_), buffers.hidden,
                  stats_from(buffers.stats, row), rows);
    logits_.forward(table, buffers.hidden, buffers.logits, rows);

    CrossEntropyArgs loss;
    loss.logits = buffers.logits;
    loss.labels = call.batch.labels + row;
    loss.loss = call.batch.loss + row;
    loss.scale = call.batch.scale;
    loss.rows = rows;
    loss.vocab = logits_.out;
    loss.write_gradient = grad != nullptr;
    loss.dtype = dtype_;
    call.ops.cross_entropy(call.queue, loss);
    if (grad == nullptr) continue;

    logits_.backward_weight(table, buffers.hidden, buffers.logits, rows);
    logits_.backward_input(table, buffers.logits, element(grad, row * logits_.in, dtype_), rows);
  }
}

void HeadBlock::forward(const BlockCall& call, const void* input, void*) {
  Workspace workspace(call.workspace);
  run_chunks(call, carve(workspace, call.ops, call.batch.rows), input, nullptr);
}

void HeadBlock::backward(const BlockCall& call, const void* input, void* grad) {
  ORLOP_INVARIANT(grad != nullptr);
  Workspace workspace(call.workspace);
  const Buffers buffers = carve(workspace, call.ops, call.batch.rows);
  run_chunks(call, buffers, input, grad);

  Norm::Backward norm;
  norm.dy = grad;
  norm.x = input;
  norm.dx = grad;
  norm.stats = buffers.stats;
  norm.rows = call.batch.rows;
  norm_.backward(LayerCall(call, 0, dtype_), norm);
}

}  // namespace orlop
