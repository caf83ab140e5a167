#include "model/block.h"

#include "base/check.h"
#include "model/embedding_block.h"
#include "model/head_block.h"
#include "model/transformer_block.h"

namespace orlop {

std::unique_ptr<Block> make_block(const TransformerConfig& config, const ModelLayout& layout,
                                  int block_index, DType dtype) {
  const BlockLayout& block = layout.blocks.at(static_cast<size_t>(block_index));
  const FlatParamLayout& own = layout.flat_params[static_cast<size_t>(block.flat_params.front())];
  switch (block.kind) {
    case BlockKind::kEmbedding:
      return std::make_unique<EmbeddingBlock>(config, own, dtype);
    case BlockKind::kTransformer:
      return std::make_unique<TransformerBlock>(config, own, dtype);
    case BlockKind::kHead:
      return std::make_unique<HeadBlock>(config, layout, block, dtype);
  }
  fail(ErrorCode::kInternal, "block {} has no kind", block.name);
}

double block_forward_flops(const TransformerConfig& config, BlockKind kind,
                           const BatchShape& shape) {
  const double rows = static_cast<double>(shape.rows);
  const double hidden = static_cast<double>(config.hidden);
  switch (kind) {
    case BlockKind::kEmbedding:
      return 0;
    case BlockKind::kHead:
      return 2 * rows * hidden * static_cast<double>(config.vocab_size);
    case BlockKind::kTransformer:
      break;
  }
  const double mlp_matrices = config.activation == Activation::kSwiGlu ? 3 : 2;
  const double weights = hidden * static_cast<double>(config.qkv_width() + config.q_width()) +
                         mlp_matrices * hidden * static_cast<double>(config.intermediate);
  return 2 * rows * weights + block_attention_flops(config, kind, shape);
}

double block_attention_flops(const TransformerConfig& config, BlockKind kind,
                             const BatchShape& shape) {
  if (kind != BlockKind::kTransformer) return 0;
  // Row r of a sequence meets r + 1 keys: (S + 1) / 2 on average, in QK^T and in PV.
  const double keys = static_cast<double>(shape.max_sequence + 1) / 2;
  return 4 * static_cast<double>(shape.rows) * static_cast<double>(config.q_width()) * keys;
}

double block_forward_bytes(const TransformerConfig& config, BlockKind kind, const BatchShape& shape,
                           DType dtype) {
  const auto hidden = static_cast<double>(config.hidden);
  double elements = 2 * hidden;  // a norm reads and writes; so does the embedding
  if (kind == BlockKind::kHead) elements += static_cast<double>(config.vocab_size);
  if (kind == BlockKind::kTransformer) {
    elements += 4 * hidden + 3 * hidden;  // a residual sum with the second norm, and one without
    const auto rotated = static_cast<double>(config.q_width() + config.kv_width());
    if (config.rope.enabled) elements += 2 * rotated;
    if (config.qk_norm) elements += 2 * rotated;
    const double activation = config.activation == Activation::kSwiGlu ? 3 : 2;
    elements += activation * static_cast<double>(config.intermediate);
  }
  return static_cast<double>(shape.rows) * elements * static_cast<double>(dtype_bytes(dtype));
}

}  // namespace orlop
