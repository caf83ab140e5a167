#include "model/param_layout.h"

#include <fmt/format.h>

#include <functional>
#include <numeric>
#include <string_view>
#include <utility>

#include "base/check.h"

namespace orlop {
namespace {

using Role = TensorRole;

// Lays segments out one behind the other; group() starts the next aligned operand.
class FlatParamBuilder {
 public:
  explicit FlatParamBuilder(std::string name) { layout_.name = std::move(name); }

  FlatParamBuilder& group(bool decay) {
    layout_.numel = align(layout_.numel);
    decay_ = decay;
    return *this;
  }

  FlatParamBuilder& add(Role role, std::string name, std::vector<int64_t> shape) {
    Segment segment;
    segment.role = role;
    segment.name = std::move(name);
    segment.numel = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    segment.shape = std::move(shape);
    segment.offset = layout_.numel;
    segment.decay = decay_;
    layout_.numel += segment.numel;
    layout_.segments.push_back(std::move(segment));
    return *this;
  }

  FlatParamLayout build() {
    layout_.numel = align(layout_.numel);
    return std::move(layout_);
  }

 private:
  static int64_t align(int64_t numel) { return ceil_div(numel, kGroupAlignment) * kGroupAlignment; }

  FlatParamLayout layout_;
  bool decay_ = true;
};

FlatParamLayout embedding_layout(const TransformerConfig& config, const std::string& base) {
  const bool gpt2 = config.transposed_linear;
  FlatParamBuilder builder("embedding");
  builder.group(true).add(Role::kTokenTable, base + (gpt2 ? "wte.weight" : "embed_tokens.weight"),
                          {config.vocab_size, config.hidden});
  if (config.learned_positions) {
    builder.group(true).add(Role::kPositionTable, base + "wpe.weight",
                            {config.max_positions, config.hidden});
  }
  return builder.build();
}

// Llama, Mistral, Qwen2, Qwen3: linear weights are (out, in).
FlatParamLayout llama_layer_layout(const TransformerConfig& c, const std::string& base, int64_t i) {
  const std::string layer = fmt::format("{}layers.{}.", base, i);
  const std::string attn = layer + "self_attn.";
  const std::string mlp = layer + "mlp.";
  FlatParamBuilder b(fmt::format("layer.{}", i));
  b.group(true)
      .add(Role::kQkvWeight, attn + "q_proj.weight", {c.q_width(), c.hidden})
      .add(Role::kQkvWeight, attn + "k_proj.weight", {c.kv_width(), c.hidden})
      .add(Role::kQkvWeight, attn + "v_proj.weight", {c.kv_width(), c.hidden});
  b.group(true).add(Role::kAttentionOutWeight, attn + "o_proj.weight", {c.hidden, c.q_width()});
  b.group(true)
      .add(Role::kMlpInWeight, mlp + "gate_proj.weight", {c.intermediate, c.hidden})
      .add(Role::kMlpInWeight, mlp + "up_proj.weight", {c.intermediate, c.hidden});
  b.group(true).add(Role::kMlpOutWeight, mlp + "down_proj.weight", {c.hidden, c.intermediate});

  b.group(false).add(Role::kAttentionNormWeight, layer + "input_layernorm.weight", {c.hidden});
  b.group(false).add(Role::kMlpNormWeight, layer + "post_attention_layernorm.weight", {c.hidden});
  if (c.qkv_bias) {
    b.group(false)
        .add(Role::kQkvBias, attn + "q_proj.bias", {c.q_width()})
        .add(Role::kQkvBias, attn + "k_proj.bias", {c.kv_width()})
        .add(Role::kQkvBias, attn + "v_proj.bias", {c.kv_width()});
  }
  if (c.attention_out_bias) {
    b.group(false).add(Role::kAttentionOutBias, attn + "o_proj.bias", {c.hidden});
  }
  if (c.qk_norm) {
    b.group(false).add(Role::kQueryNormWeight, attn + "q_norm.weight", {c.head_dim});
    b.group(false).add(Role::kKeyNormWeight, attn + "k_norm.weight", {c.head_dim});
  }
  if (c.mlp_bias) {
    b.group(false)
        .add(Role::kMlpInBias, mlp + "gate_proj.bias", {c.intermediate})
        .add(Role::kMlpInBias, mlp + "up_proj.bias", {c.intermediate});
    b.group(false).add(Role::kMlpOutBias, mlp + "down_proj.bias", {c.hidden});
  }
  return b.build();
}

// GPT-2: linear weights are Conv1D's (in, out), q, k and v are one tensor.
FlatParamLayout gpt2_layer_layout(const TransformerConfig& c, const std::string& base, int64_t i) {
  const std::string layer = fmt::format("{}h.{}.", base, i);
  const std::string attn = layer + "attn.";
  const std::string mlp = layer + "mlp.";
  FlatParamBuilder b(fmt::format("layer.{}", i));
  b.group(true).add(Role::kQkvWeight, attn + "c_attn.weight", {c.hidden, c.qkv_width()});
  b.group(true).add(Role::kAttentionOutWeight, attn + "c_proj.weight", {c.q_width(), c.hidden});
  b.group(true).add(Role::kMlpInWeight, mlp + "c_fc.weight", {c.hidden, c.intermediate});
  b.group(true).add(Role::kMlpOutWeight, mlp + "c_proj.weight", {c.intermediate, c.hidden});

  b.group(false).add(Role::kAttentionNormWeight, layer + "ln_1.weight", {c.hidden});
  b.group(false).add(Role::kAttentionNormBias, layer + "ln_1.bias", {c.hidden});
  b.group(false).add(Role::kMlpNormWeight, layer + "ln_2.weight", {c.hidden});
  b.group(false).add(Role::kMlpNormBias, layer + "ln_2.bias", {c.hidden});
  b.group(false).add(Role::kQkvBias, attn + "c_attn.bias", {c.qkv_width()});
  b.group(false).add(Role::kAttentionOutBias, attn + "c_proj.bias", {c.hidden});
  b.group(false).add(Role::kMlpInBias, mlp + "c_fc.bias", {c.intermediate});
  b.group(false).add(Role::kMlpOutBias, mlp + "c_proj.bias", {c.hidden});
  return b.build();
}

FlatParamLayout head_layout(const TransformerConfig& config, const std::string& base) {
  const std::string norm = base + (config.transposed_linear ? "ln_f" : "norm");
  FlatParamBuilder builder("head");
  if (!config.tied_embeddings) {
    builder.group(true).add(Role::kLogitsWeight, "lm_head.weight",
                            {config.vocab_size, config.hidden});
  }
  builder.group(false).add(Role::kFinalNormWeight, norm + ".weight", {config.hidden});
  if (config.layer_norm) {
    builder.group(false).add(Role::kFinalNormBias, norm + ".bias", {config.hidden});
  }
  return builder.build();
}

}  // namespace

const Segment* FlatParamLayout::find(const std::string& tensor) const {
  for (const Segment& segment : segments) {
    if (segment.name == tensor) return &segment;
  }
  return nullptr;
}

const Segment* FlatParamLayout::find(TensorRole role) const {
  for (const Segment& segment : segments) {
    if (segment.role == role) return &segment;
  }
  return nullptr;
}

std::vector<std::string> ModelLayout::names_in_file(const std::string& segment) const {
  std::vector<std::string> names{segment};
  if (segment.starts_with(base_prefix)) names.push_back(segment.substr(base_prefix.size()));
  return names;
}

bool ModelLayout::is_passed_over(const std::string& name_in_file) const {
  const std::string_view name = name_in_file;
  if (tied_embeddings && name == "lm_head.weight") return true;
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") ||
         name.ends_with(".rotary_emb.inv_freq");
}

int64_t ModelLayout::numel() const {
  int64_t sum = 0;
  for (const FlatParamLayout& flat : flat_params) sum += flat.numel;
  return sum;
}

int64_t ModelLayout::trainable_numel() const {
  int64_t sum = 0;
  for (const FlatParamLayout& flat : flat_params) {
    for (const Segment& segment : flat.segments) sum += segment.numel;
  }
  return sum;
}

ModelLayout make_layout(const TransformerConfig& config) {
  ModelLayout layout;
  layout.base_prefix = config.transposed_linear ? "transformer." : "model.";
  layout.tied_embeddings = config.tied_embeddings;
  const auto add_block = [&layout](BlockKind kind, FlatParamLayout flat) {
    const int index = static_cast<int>(layout.flat_params.size());
    layout.blocks.push_back({flat.name, kind, {index}});
    layout.flat_params.push_back(std::move(flat));
  };

  add_block(BlockKind::kEmbedding, embedding_layout(config, layout.base_prefix));
  for (int64_t i = 0; i < config.layers; ++i) {
    add_block(BlockKind::kTransformer, config.transposed_linear
                                           ? gpt2_layer_layout(config, layout.base_prefix, i)
                                           : llama_layer_layout(config, layout.base_prefix, i));
  }
  add_block(BlockKind::kHead, head_layout(config, layout.base_prefix));
  if (config.tied_embeddings) layout.blocks.back().flat_params.push_back(0);
  return layout;
}

}  // namespace orlop
