#pragma once

#include "model/block.h"

namespace orlop {

// out[row] = token_table[token] (+ position_table[position], GPT-2). Needs no workspace. Backward
// adds to the rows of the tables that the micro-batch used, in row order.
class EmbeddingBlock final : public Block {
 public:
  EmbeddingBlock(const TransformerConfig& config, const FlatParamLayout& layout, DType dtype);

  size_t workspace_bytes(const Ops& ops, const BatchShape& shape, bool backward) const override;
  void forward(const BlockCall& call, const void* input, void* output) override;
  void backward(const BlockCall& call, const void* input, void* grad) override;

 private:
  int64_t vocab_;
  int64_t hidden_;
  int64_t token_table_;     // element offsets in the FlatParam
  int64_t position_table_;  // LayerCall::kAbsent without learned positions
  DType dtype_;
};

}  // namespace orlop
