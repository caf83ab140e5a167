#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/transformer_config.h"

namespace orlop {

// One named tensor inside a FlatParam.
struct Segment {
  std::string name;            // as in the Hugging Face file
  std::vector<int64_t> shape;  // as in the file
  int64_t offset = 0;          // in elements, from the FlatParam's start
  int64_t numel = 0;
  bool decay = true;           // weight decay applies (not to norms and biases)
};

// The unit of shard, fetch and update: tensors laid out contiguously. Groups that one matmul reads as
// one matrix (q, k, v; gate, up) have no gap inside; every group starts at a multiple of kDeviceAlignment
// bytes in any compute dtype. Gaps hold zeros and stay zero.
struct FlatParamLayout {
  std::string name;  // "embedding", "layer.7", "head"
  int64_t numel = 0; // gaps included
  std::vector<Segment> segments;

  const Segment* find(const std::string& tensor) const;
};

enum class BlockKind : uint8_t { kEmbedding, kTransformer, kHead };

// The unit of release and recompute. Blocks refer to FlatParams: a tied head refers to its own and to
// the embedding's.
struct BlockLayout {
  std::string name;
  BlockKind kind = BlockKind::kTransformer;
  std::vector<int> flat_params;  // indices into ModelLayout::flat_params; the block's own first
};

struct ModelLayout {
  std::vector<FlatParamLayout> flat_params;  // in order of first use
  std::vector<BlockLayout> blocks;           // embedding, layers, head

  int64_t numel() const;          // gaps included
  int64_t trainable_numel() const;  // without gaps: what the model card calls its parameters
};

ModelLayout make_layout(const TransformerConfig& config);

}  // namespace orlop
