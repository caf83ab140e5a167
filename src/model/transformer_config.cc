#include "model/transformer_config.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "formats/hf_config.h"
#include "model/rope.h"

namespace orlop {
namespace {

void refuse_dropout(const HfConfig& hf, double value, const char* field) {
  check(value == 0, ErrorCode::kInvalidData,
        "{}: {} is {}; dropout is not supported, set the field to 0 to train without it", hf.file,
        field, value);
}

void refuse_flag(const HfConfig& hf, bool set, const char* field, bool supported) {
  check(!set, ErrorCode::kInvalidData, "{}: {} is {}; only {} is supported", hf.file, field,
        !supported, supported);
}

void check_architecture(const HfConfig& hf) {
  const bool gpt2 = hf.model_type == "gpt2";
  for (const std::string& name : hf.architectures) {
    check(name.ends_with(gpt2 ? "LMHeadModel" : "ForCausalLM") || name.ends_with("Model"),
          ErrorCode::kInvalidData,
          "{}: architectures has \"{}\"; supported are causal language models only", hf.file, name);
  }
}

void check_heads(const TransformerConfig& config) {
  check(config.heads % config.kv_heads == 0, ErrorCode::kInvalidData,
        "{}: num_attention_heads {} is not a multiple of num_key_value_heads {}", config.file,
        config.heads, config.kv_heads);
}

int64_t effective_window(const HfConfig& hf) {
  for (const std::string& type : hf.layer_types) {
    check(type == "full_attention" || type == "sliding_attention", ErrorCode::kInvalidData,
          "{}: layer_types has \"{}\"; supported are full_attention and sliding_attention", hf.file,
          type);
  }
  if (!hf.sliding_window.has_value()) return 0;
  if (hf.model_type == "mistral") return *hf.sliding_window;
  if (!hf.use_sliding_window) return 0;
  const bool some_layer = hf.layer_types.empty()
                              ? hf.max_window_layers.value_or(0) < hf.num_hidden_layers
                              : std::find(hf.layer_types.begin(), hf.layer_types.end(),
                                          "sliding_attention") != hf.layer_types.end();
  return some_layer ? *hf.sliding_window : 0;
}

void fill_llama_family(const HfConfig& hf, TransformerConfig& config) {
  refuse_dropout(hf, hf.attention_dropout, "attention_dropout");
  check(hf.hidden_act == "silu" || hf.hidden_act == "swish", ErrorCode::kInvalidData,
        "{}: hidden_act \"{}\" is not supported for model_type {}; supported is silu", hf.file,
        hf.hidden_act, hf.model_type);
  config.activation = Activation::kSwiGlu;
  const bool optional_bias = hf.model_type == "llama" || hf.model_type == "qwen3";
  config.qkv_bias = hf.model_type == "qwen2" || (optional_bias && hf.attention_bias);
  config.attention_out_bias = optional_bias && hf.attention_bias;
  config.mlp_bias = hf.model_type == "llama" && hf.mlp_bias;
  config.qk_norm = hf.model_type == "qwen3";
  config.sliding_window = hf.model_type == "llama" ? 0 : effective_window(hf);
  config.rope = make_rope_config(hf.rope, hf.head_dim, hf.file);
}

void fill_gpt2(const HfConfig& hf, TransformerConfig& config) {
  refuse_dropout(hf, hf.resid_pdrop, "resid_pdrop");
  refuse_dropout(hf, hf.embd_pdrop, "embd_pdrop");
  refuse_dropout(hf, hf.attention_dropout, "attn_pdrop");
  refuse_flag(hf, !hf.scale_attn_weights, "scale_attn_weights", true);
  refuse_flag(hf, hf.scale_attn_by_inverse_layer_idx, "scale_attn_by_inverse_layer_idx", false);
  refuse_flag(hf, hf.add_cross_attention, "add_cross_attention", false);
  if (hf.hidden_act == "gelu_new" || hf.hidden_act == "gelu_pytorch_tanh") {
    config.activation = Activation::kGeluTanh;
  } else {
    check(hf.hidden_act == "gelu", ErrorCode::kInvalidData,
          "{}: activation_function \"{}\" is not supported; supported are gelu_new, "
          "gelu_pytorch_tanh "
          "and gelu",
          hf.file, hf.hidden_act);
    config.activation = Activation::kGelu;
  }
  config.layer_norm = true;
  config.qkv_bias = config.attention_out_bias = config.mlp_bias = true;
  config.learned_positions = true;
  config.transposed_linear = true;
}

}  // namespace

float TransformerConfig::attention_scale() const {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
}

TransformerConfig make_transformer_config(const HfConfig& hf) {
  check_architecture(hf);
  TransformerConfig config;
  config.model_type = hf.model_type;
  config.file = hf.file;
  config.vocab_size = hf.vocab_size;
  config.hidden = hf.hidden_size;
  config.layers = hf.num_hidden_layers;
  config.heads = hf.num_attention_heads;
  config.kv_heads = hf.num_key_value_heads;
  config.head_dim = hf.head_dim;
  config.intermediate = hf.intermediate_size;
  config.max_positions = hf.max_position_embeddings;
  config.norm_eps = static_cast<float>(hf.norm_eps);
  config.tied_embeddings = hf.tie_word_embeddings;
  check_heads(config);
  if (hf.model_type == "gpt2") {
    fill_gpt2(hf, config);
  } else {
    fill_llama_family(hf, config);
  }
  return config;
}

void check_sequence_length(const TransformerConfig& config, int64_t tokens) {
  check(tokens <= config.max_positions, ErrorCode::kUsage,
        "batch.sequence_length is {}; {} allows {} ({})", tokens, config.file, config.max_positions,
        config.learned_positions ? "n_positions" : "max_position_embeddings");
  check(
      config.sliding_window == 0 || tokens <= config.sliding_window, ErrorCode::kUsage,
      "batch.sequence_length is {}; by {} a token attends within {} (sliding_window), and windows "
      "shorter than the sequence are not supported",
      tokens, config.file, config.sliding_window);
}

}  // namespace orlop
