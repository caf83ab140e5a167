#include "model/embedding_block.h"

#include "model/layers.h"

namespace orlop {

EmbeddingBlock::EmbeddingBlock(const TransformerConfig& config, const FlatParamLayout& layout,
                               DType dtype)
    : vocab_(config.vocab_size),
      hidden_(config.hidden),
      token_table_(operand_offset(layout, TensorRole::kTokenTable)),
      position_table_(operand_offset(layout, TensorRole::kPositionTable)),
      dtype_(dtype) {}

size_t EmbeddingBlock::workspace_bytes(const Ops&, const BatchShape&, bool) const { return 0; }

void EmbeddingBlock::forward(const BlockCall& call, const void*, void* output) {
  const LayerCall layer(call, 0, dtype_);
  EmbeddingArgs args;
  args.tokens = call.batch.tokens;
  args.table = layer.weight(token_table_);
  args.positions = call.batch.positions;
  args.positions_table = layer.weight(position_table_);
  args.out = output;
  args.rows = call.batch.rows;
  args.cols = hidden_;
  args.vocab = vocab_;
  args.dtype = dtype_;
  call.ops.embedding_forward(call.queue, args);
}

void EmbeddingBlock::backward(const BlockCall& call, const void*, void* grad) {
  const LayerCall layer(call, 0, dtype_);
  const BatchView& batch = call.batch;
  EmbeddingBackwardArgs args;
  args.dy = grad;
  args.rows = batch.rows;
  args.cols = hidden_;
  args.dtype = dtype_;

  args.dtable = layer.grad(token_table_);
  args.sorted_rows = batch.token_rows;
  args.run_begin = batch.token_run_begin;
  args.run_index = batch.token_run_index;
  args.runs = batch.token_runs;
  call.ops.embedding_backward(call.queue, args);
  if (position_table_ == LayerCall::kAbsent) return;

  args.dtable = layer.grad(position_table_);
  args.sorted_rows = batch.position_rows;
  args.run_begin = batch.position_run_begin;
  args.run_index = batch.position_run_index;
  args.runs = batch.position_runs;
  call.ops.embedding_backward(call.queue, args);
}

}  // namespace orlop
