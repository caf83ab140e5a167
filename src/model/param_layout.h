#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "model/transformer_config.h"

namespace orlop {

// The operand of an operation that a tensor is, or is a part of: q, k and v are one operand, gate
// and up are one, whether the file holds them apart or fused. Blocks find their operands by role,
// so they know no family's names.
enum class TensorRole : uint8_t {
  kTokenTable,
  kPositionTable,
  kAttentionNormWeight,
  kAttentionNormBias,
  kQkvWeight,
  kQkvBias,
  kQueryNormWeight,
  kKeyNormWeight,
  kAttentionOutWeight,
  kAttentionOutBias,
  kMlpNormWeight,
  kMlpNormBias,
  kMlpInWeight,  // gate | up, or GPT-2's c_fc
  kMlpInBias,
  kMlpOutWeight,
  kMlpOutBias,
  kFinalNormWeight,
  kFinalNormBias,
  kLogitsWeight,
};

// One named tensor inside a FlatParam.
struct Segment {
  TensorRole role = TensorRole::kTokenTable;
  std::string name;            // as in the Hugging Face file
  std::vector<int64_t> shape;  // as in the file
  int64_t offset = 0;          // in elements, from the FlatParam's start
  int64_t numel = 0;
  bool decay = true;  // weight decay applies (not to norms and biases)
};

// The unit of shard, fetch and update: tensors laid out contiguously. Groups that one matmul reads
// as one matrix (q, k, v; gate, up) have no gap inside; every group starts at a multiple of
// kDeviceAlignment bytes in any compute dtype. Tensors that decay come first. Gaps hold zeros and
// stay zero.
struct FlatParamLayout {
  std::string name;   // "embedding", "layer.7", "head"
  int64_t numel = 0;  // gaps included
  std::vector<Segment> segments;

  // Null when the FlatParam has none. By role: the first segment, where the operand starts.
  const Segment* find(const std::string& tensor) const;
  const Segment* find(TensorRole role) const;
};

// Elements by which tensor groups and the length of a FlatParam are aligned: kDeviceAlignment bytes
// of a 16-bit dtype.
inline constexpr int64_t kGroupAlignment = static_cast<int64_t>(kDeviceAlignment) / 2;

enum class BlockKind : uint8_t { kEmbedding, kTransformer, kHead };

// The unit of release and recompute. Blocks refer to FlatParams: a tied head refers to its own and
// to the embedding's.
struct BlockLayout {
  std::string name;
  BlockKind kind = BlockKind::kTransformer;
  std::vector<int> flat_params;  // indices into ModelLayout::flat_params; the block's own first
};

struct ModelLayout {
  std::vector<FlatParamLayout> flat_params;  // in order of first use
  std::vector<BlockLayout> blocks;           // embedding, layers, head
  std::string base_prefix;                   // "model." or "transformer."; absent in some files
  bool tied_embeddings = false;

  // The names under which a Hugging Face file may hold the segment, the canonical one first.
  std::vector<std::string> names_in_file(const std::string& segment) const;

  // True for entries that files hold beside the parameters and that a loader passes over: causal
  // masks and rotary frequencies of old exports, and the head's copy of a tied embedding.
  bool is_passed_over(const std::string& name_in_file) const;

  int64_t numel() const;            // gaps included
  int64_t trainable_numel() const;  // without gaps: what the model card calls its parameters
};

ModelLayout make_layout(const TransformerConfig& config);

}  // namespace orlop
