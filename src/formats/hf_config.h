#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace orlop {

// Rotary embedding as written in `rope_parameters` (transformers 5) or `rope_scaling` and
// `rope_theta` (before). What the file leaves out and transformers has no default for is empty.
struct HfRope {
  std::string type = "default";  // `rope_type`, or `type` in old files
  double theta = 10000.0;
  std::optional<double> factor;
  std::optional<double> low_freq_factor;
  std::optional<double> high_freq_factor;
  // For the types llama3, yarn and longrope max_position_embeddings where the file has none.
  std::optional<int64_t> original_max_position_embeddings;
  std::optional<double> attention_factor;
  std::optional<double> beta_fast;
  std::optional<double> beta_slow;
  std::optional<double> partial_rotary_factor;
};

// What Orlop reads of a Hugging Face config.json, under the names of the Llama family (GPT-2's
// n_embd is hidden_size and so on). Raw: which combinations can run is decided by
// make_transformer_config(). Absent fields have the defaults of transformers' config class of the
// model type.
struct HfConfig {
  std::string file;  // for errors
  std::string model_type;
  std::vector<std::string> architectures;

  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;  // GPT-2's n_inner; 4 x hidden_size where that is null
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t head_dim = 0;
  int64_t max_position_embeddings = 0;

  double norm_eps = 0;     // rms_norm_eps or layer_norm_epsilon
  std::string hidden_act;  // or GPT-2's activation_function
  bool tie_word_embeddings = false;
  bool attention_bias = false;
  bool mlp_bias = false;
  HfRope rope;  // not for gpt2

  std::optional<int64_t> sliding_window;  // tokens; empty: none
  bool use_sliding_window = false;        // qwen2, qwen3: sliding_window counts only when true
  std::optional<int64_t> max_window_layers;
  std::vector<std::string> layer_types;  // empty when absent

  double attention_dropout = 0;  // GPT-2's attn_pdrop
  double resid_pdrop = 0;
  double embd_pdrop = 0;

  // GPT-2 only.
  bool scale_attn_weights = true;
  bool scale_attn_by_inverse_layer_idx = false;
  bool reorder_and_upcast_attn = false;
  bool add_cross_attention = false;

  std::optional<int64_t> bos_token_id;
  std::vector<int64_t> eos_token_ids;
  std::optional<int64_t> pad_token_id;
  std::optional<std::string> dtype;  // `dtype` or `torch_dtype`, e.g. "bfloat16"
};

// Model types that read_hf_config() knows: "llama, mistral, ...".
std::string supported_model_types();

// Reads config.json of a folder, or the named file. Throws Error(kInvalidData) with file, field and
// value found for a wrong type, a value out of range, a missing shape field or an unknown
// model_type.
HfConfig read_hf_config(const std::filesystem::path& file_or_folder);

// The same from text that is called `file` in errors.
HfConfig parse_hf_config(std::string_view json, const std::string& file);

}  // namespace orlop
