#include "formats/hf_config.h"

#include <algorithm>
#include <array>

#include "base/bytes.h"
#include "base/check.h"
#include "formats/file_io.h"
#include "formats/json_input.h"

namespace orlop {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxConfigBytes = 16 * kMiB;
// Above any real model and small enough that products of two stay exact.
constexpr int64_t kMaxDim = int64_t{1} << 31;

// Where transformers' config classes of the Llama family differ.
struct FamilyDefaults {
  const char* model_type;
  std::optional<int64_t> kv_heads;  // empty: as many as heads
  std::optional<int64_t> head_dim;  // empty: hidden_size / num_attention_heads
  std::optional<int64_t> sliding_window;
  std::optional<int64_t> max_window_layers;
  std::optional<int64_t> bos;
  std::optional<int64_t> eos;
};

constexpr std::array kFamilies{
    FamilyDefaults{"llama", {}, {}, {}, {}, 1, 2},
    FamilyDefaults{"mistral", 8, {}, 4096, {}, 1, 2},
    FamilyDefaults{"qwen2", 32, {}, 4096, 28, {}, {}},
    FamilyDefaults{"qwen3", 32, 128, 4096, 28, {}, {}},
};
constexpr const char* kGpt2 = "gpt2";

// An absent field has the default; null stands for "none".
std::optional<int64_t> integer_or(const JsonFields& fields, const char* key, int64_t min,
                                  std::optional<int64_t> fallback) {
  return fields.contains(key) ? fields.optional_integer(key, min) : fallback;
}

double probability_or(const JsonFields& fields, const char* key, double fallback) {
  const double value = fields.optional_number(key).value_or(fallback);
  if (!(value >= 0 && value < 1)) fields.refuse(key, "a number from 0 to below 1");
  return value;
}

double positive_or(const JsonFields& fields, const char* key, double fallback) {
  const double value = fields.optional_number(key).value_or(fallback);
  if (!(value > 0)) fields.refuse(key, "a positive number");
  return value;
}

std::vector<int64_t> token_ids_or(const JsonFields& fields, const char* key,
                                  std::optional<int64_t> fallback) {
  if (!fields.contains(key)) {
    return fallback ? std::vector<int64_t>{*fallback} : std::vector<int64_t>{};
  }
  const nlohmann::json* value = fields.find(key);
  if (value == nullptr) return {};
  if (!value->is_array()) return {*fields.optional_integer(key, 0)};
  std::vector<int64_t> ids;
  for (const nlohmann::json& id : *value) {
    if (!id.is_number_unsigned() ||
        id.get<uint64_t>() > static_cast<uint64_t>(JsonFields::kMaxInteger)) {
      fields.refuse(key, "a token id or a list of token ids");
    }
    ids.push_back(id.get<int64_t>());
  }
  return ids;
}

// Precedence as in transformers: rope_scaling replaces rope_parameters; a theta inside replaces the
// one outside.
HfRope parse_rope(const JsonFields& fields, int64_t max_positions) {
  HfRope rope;
  rope.theta = positive_or(fields, "rope_theta", rope.theta);
  rope.partial_rotary_factor = fields.optional_number("partial_rotary_factor");

  auto inner = fields.optional_object("rope_scaling");
  if (!inner || inner->json().empty()) inner = fields.optional_object("rope_parameters");
  if (!inner) return rope;
  for (const auto& [key, value] : inner->json().items()) {
    if (value.is_object()) {
      inner->refuse(key.c_str(), "a plain value (rotary embeddings per layer type are not read)");
    }
  }
  const auto old_type = inner->optional_string("type");
  rope.type = inner->optional_string("rope_type").value_or(old_type.value_or(rope.type));
  rope.theta = positive_or(*inner, "rope_theta", rope.theta);
  rope.factor = inner->optional_number("factor");
  rope.low_freq_factor = inner->optional_number("low_freq_factor");
  rope.high_freq_factor = inner->optional_number("high_freq_factor");
  rope.attention_factor = inner->optional_number("attention_factor");
  rope.beta_fast = inner->optional_number("beta_fast");
  rope.beta_slow = inner->optional_number("beta_slow");
  if (const auto partial = inner->optional_number("partial_rotary_factor")) {
    rope.partial_rotary_factor = partial;
  }
  rope.original_max_position_embeddings =
      inner->optional_integer("original_max_position_embeddings", 1, kMaxDim);
  const bool needs_original =
      rope.type == "llama3" || rope.type == "yarn" || rope.type == "longrope";
  if (needs_original) {
    const auto outside = fields.optional_integer("original_max_position_embeddings", 1, kMaxDim);
    if (outside) rope.original_max_position_embeddings = outside;
    if (!rope.original_max_position_embeddings) {
      rope.original_max_position_embeddings = max_positions;
    }
  }
  return rope;
}

void parse_common(const JsonFields& fields, HfConfig& config) {
  config.architectures = fields.string_list("architectures");
  config.pad_token_id = fields.optional_integer("pad_token_id", -1);
  config.dtype = fields.optional_string("dtype");
  if (!config.dtype) config.dtype = fields.optional_string("torch_dtype");
  config.vocab_size = fields.integer("vocab_size", 1, kMaxDim);
}

int64_t default_head_dim(const JsonFields& fields, const HfConfig& config) {
  check(config.hidden_size % config.num_attention_heads == 0, ErrorCode::kInvalidData,
        "'{}': hidden size {} is not a multiple of {} attention heads, and no 'head_dim' is given",
        fields.file(), config.hidden_size, config.num_attention_heads);
  return config.hidden_size / config.num_attention_heads;
}

void parse_llama_family(const JsonFields& fields, const FamilyDefaults& defaults,
                        HfConfig& config) {
  config.hidden_size = fields.integer("hidden_size", 1, kMaxDim);
  config.intermediate_size = fields.integer("intermediate_size", 1, kMaxDim);
  config.num_hidden_layers = fields.integer("num_hidden_layers", 1, kMaxDim);
  config.num_attention_heads = fields.integer("num_attention_heads", 1, kMaxDim);
  config.max_position_embeddings = fields.integer("max_position_embeddings", 1, kMaxDim);
  config.num_key_value_heads = integer_or(fields, "num_key_value_heads", 1, defaults.kv_heads)
                                   .value_or(config.num_attention_heads);
  const auto head_dim = integer_or(fields, "head_dim", 1, defaults.head_dim);
  config.head_dim = head_dim ? *head_dim : default_head_dim(fields, config);

  config.norm_eps = positive_or(fields, "rms_norm_eps", 1e-6);
  config.hidden_act = fields.optional_string("hidden_act").value_or("silu");
  config.tie_word_embeddings = fields.optional_boolean("tie_word_embeddings").value_or(false);
  config.attention_bias = fields.optional_boolean("attention_bias").value_or(false);
  config.mlp_bias = fields.optional_boolean("mlp_bias").value_or(false);
  config.rope = parse_rope(fields, config.max_position_embeddings);

  config.sliding_window = integer_or(fields, "sliding_window", 1, defaults.sliding_window);
  config.use_sliding_window = fields.optional_boolean("use_sliding_window").value_or(false);
  config.max_window_layers = integer_or(fields, "max_window_layers", 0, defaults.max_window_layers);
  config.layer_types = fields.string_list("layer_types");
  config.attention_dropout = probability_or(fields, "attention_dropout", 0);
  config.bos_token_id = integer_or(fields, "bos_token_id", 0, defaults.bos);
  config.eos_token_ids = token_ids_or(fields, "eos_token_id", defaults.eos);
}

void parse_gpt2(const JsonFields& fields, HfConfig& config) {
  constexpr int64_t kEndOfText = 50256;
  config.hidden_size = fields.integer("n_embd", 1, kMaxDim);
  config.num_hidden_layers = fields.integer("n_layer", 1, kMaxDim);
  config.num_attention_heads = fields.integer("n_head", 1, kMaxDim);
  config.max_position_embeddings = fields.integer("n_positions", 1, kMaxDim);
  config.num_key_value_heads = config.num_attention_heads;
  config.head_dim = default_head_dim(fields, config);
  config.intermediate_size =
      fields.optional_integer("n_inner", 1, kMaxDim).value_or(4 * config.hidden_size);

  config.norm_eps = positive_or(fields, "layer_norm_epsilon", 1e-5);
  config.hidden_act = fields.optional_string("activation_function").value_or("gelu_new");
  config.tie_word_embeddings = fields.optional_boolean("tie_word_embeddings").value_or(true);
  config.attention_bias = true;  // GPT-2 has no such fields: it always has both
  config.mlp_bias = true;
  config.attention_dropout = probability_or(fields, "attn_pdrop", 0.1);
  config.resid_pdrop = probability_or(fields, "resid_pdrop", 0.1);
  config.embd_pdrop = probability_or(fields, "embd_pdrop", 0.1);
  config.scale_attn_weights = fields.optional_boolean("scale_attn_weights").value_or(true);
  config.scale_attn_by_inverse_layer_idx =
      fields.optional_boolean("scale_attn_by_inverse_layer_idx").value_or(false);
  config.reorder_and_upcast_attn =
      fields.optional_boolean("reorder_and_upcast_attn").value_or(false);
  config.add_cross_attention = fields.optional_boolean("add_cross_attention").value_or(false);
  config.bos_token_id = integer_or(fields, "bos_token_id", 0, kEndOfText);
  config.eos_token_ids = token_ids_or(fields, "eos_token_id", kEndOfText);
}

}  // namespace

std::string supported_model_types() {
  std::string names;
  for (const FamilyDefaults& family : kFamilies) names += fmt::format("{}, ", family.model_type);
  return names + kGpt2;
}

HfConfig parse_hf_config(std::string_view json, const std::string& file) {
  const nlohmann::json root = parse_json(json, file);
  const JsonFields fields(root, file);
  HfConfig config;
  config.file = file;
  config.model_type = fields.string("model_type");
  const auto* family = std::find_if(
      kFamilies.begin(), kFamilies.end(),
      [&](const FamilyDefaults& known) { return config.model_type == known.model_type; });
  check(family != kFamilies.end() || config.model_type == kGpt2, ErrorCode::kInvalidData,
        "'{}': 'model_type' is {}; supported are {}", file, json_excerpt(config.model_type),
        supported_model_types());
  parse_common(fields, config);
  if (config.model_type == kGpt2) {
    parse_gpt2(fields, config);
  } else {
    parse_llama_family(fields, *family, config);
  }
  return config;
}

HfConfig read_hf_config(const fs::path& file_or_folder) {
  std::error_code error;
  const bool is_folder = fs::is_directory(file_or_folder, error);
  const fs::path path = is_folder ? file_or_folder / "config.json" : file_or_folder;
  check(fs::exists(path, error), ErrorCode::kInvalidData, "'{}' {}", file_or_folder.string(),
        is_folder ? "is no Hugging Face folder: it has no config.json" : "does not exist");
  return parse_hf_config(read_text_file(path, kMaxConfigBytes), path.string());
}

}  // namespace orlop
