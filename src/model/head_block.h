#pragma once

#include "model/block.h"
#include "model/layers.h"

namespace orlop {

class Workspace;

// Final norm, logits and cross-entropy, in chunks of Ops::head_chunk_rows() rows: the logits of the
// whole batch never exist. A tied head reads its logits weight from the embedding's FlatParam
// (params[1]).
class HeadBlock final : public Block {
 public:
  HeadBlock(const TransformerConfig& config, const ModelLayout& layout, const BlockLayout& block,
            DType dtype);

  size_t workspace_bytes(const Ops& ops, const BatchShape& shape, bool backward) const override;
  void forward(const BlockCall& call, const void* input, void* output) override;
  void backward(const BlockCall& call, const void* input, void* grad) override;

 private:
  // C = rows of a chunk; statistics cover all N rows because the norm's backward runs once.
  struct Buffers {
    NormStats stats;         // (N)
    void* hidden = nullptr;  // (C, D) normalised input of the chunk
    void* logits = nullptr;  // (C, V), then their gradient
  };
  Buffers carve(Workspace& workspace, const Ops& ops, int64_t rows) const;

  // Loss of every row; with `grad`, also the logits weight's gradient and, in `grad`, the gradient
  // of the normalised input.
  void run_chunks(const BlockCall& call, const Buffers& buffers, const void* input, void* grad);

  Norm norm_;
  Linear logits_;
  size_t logits_param_ = 0;  // index into BlockCall::params
  DType dtype_;
};

}  // namespace orlop
