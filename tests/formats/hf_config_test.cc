#include "formats/hf_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/formats/support.h"

namespace orlop {
namespace {

using nlohmann::json;
using test::error_of;
using test::spill;
using test::TempFolder;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

json llama_shape(const std::string& model_type = "llama") {
  return {
      {"model_type", model_type},  {"vocab_size", 49152},     {"hidden_size", 576},
      {"intermediate_size", 1536}, {"num_hidden_layers", 30}, {"num_attention_heads", 9},
      {"num_key_value_heads", 3},  {"rms_norm_eps", 1e-5},    {"max_position_embeddings", 8192}};
}

json gpt2_shape() {
  return {{"model_type", "gpt2"}, {"vocab_size", 50257}, {"n_embd", 768},
          {"n_layer", 12},        {"n_head", 12},        {"n_positions", 1024}};
}

HfConfig parse(const json& config) { return parse_hf_config(config.dump(), "config.json"); }

std::string refusal(const json& config) {
  return error_of(ErrorCode::kInvalidData, [&] { parse(config); });
}

// `base` with one field replaced.
json with(json base, const std::string& key, const json& value) {
  base[key] = value;
  return base;
}

json without(json base, const std::string& key) {
  base.erase(key);
  return base;
}

TEST(HfConfig, ReadsALlamaFolder) {
  json config = llama_shape();
  config["architectures"] = {"LlamaForCausalLM"};
  config["tie_word_embeddings"] = true;
  config["rope_theta"] = 100000;
  config["torch_dtype"] = "bfloat16";
  config["bos_token_id"] = 1;
  config["eos_token_id"] = {2, 7};
  config["an_unknown_field"] = {{"x", 1}};
  const TempFolder folder;
  spill(folder / "config.json", config.dump(2));

  const HfConfig hf = read_hf_config(folder.path());
  EXPECT_EQ(hf.file, (folder / "config.json").string());
  EXPECT_EQ(hf.model_type, "llama");
  EXPECT_THAT(hf.architectures, ElementsAre("LlamaForCausalLM"));
  EXPECT_EQ(hf.vocab_size, 49152);
  EXPECT_EQ(hf.hidden_size, 576);
  EXPECT_EQ(hf.intermediate_size, 1536);
  EXPECT_EQ(hf.num_hidden_layers, 30);
  EXPECT_EQ(hf.num_attention_heads, 9);
  EXPECT_EQ(hf.num_key_value_heads, 3);
  EXPECT_EQ(hf.head_dim, 64);
  EXPECT_EQ(hf.max_position_embeddings, 8192);
  EXPECT_EQ(hf.norm_eps, 1e-5);
  EXPECT_TRUE(hf.tie_word_embeddings);
  EXPECT_EQ(hf.rope.type, "default");
  EXPECT_EQ(hf.rope.theta, 100000);
  EXPECT_EQ(hf.dtype, "bfloat16");
  EXPECT_EQ(hf.bos_token_id, 1);
  EXPECT_THAT(hf.eos_token_ids, ElementsAre(2, 7));
}

TEST(HfConfig, LlamaDefaultsAreThoseOfTransformers) {
  const HfConfig hf = parse(without(without(llama_shape(), "num_key_value_heads"), "rms_norm_eps"));
  EXPECT_EQ(hf.num_key_value_heads, 9);
  EXPECT_EQ(hf.norm_eps, 1e-6);
  EXPECT_EQ(hf.hidden_act, "silu");
  EXPECT_FALSE(hf.tie_word_embeddings);
  EXPECT_FALSE(hf.attention_bias);
  EXPECT_FALSE(hf.mlp_bias);
  EXPECT_EQ(hf.rope.theta, 10000.0);
  EXPECT_EQ(hf.sliding_window, std::nullopt);
  EXPECT_EQ(hf.attention_dropout, 0);
  EXPECT_EQ(hf.bos_token_id, 1);
  EXPECT_THAT(hf.eos_token_ids, ElementsAre(2));
  EXPECT_EQ(hf.pad_token_id, std::nullopt);
  EXPECT_EQ(hf.dtype, std::nullopt);
}

TEST(HfConfig, MistralDefaults) {
  const HfConfig hf = parse(without(llama_shape("mistral"), "num_key_value_heads"));
  EXPECT_EQ(hf.num_key_value_heads, 8);
  EXPECT_EQ(hf.sliding_window, 4096);
  EXPECT_EQ(parse(with(llama_shape("mistral"), "sliding_window", nullptr)).sliding_window,
            std::nullopt);
}

TEST(HfConfig, QwenDefaults) {
  for (const char* type : {"qwen2", "qwen3"}) {
    const HfConfig hf = parse(without(llama_shape(type), "num_key_value_heads"));
    EXPECT_EQ(hf.num_key_value_heads, 32) << type;
    EXPECT_EQ(hf.sliding_window, 4096) << type;
    EXPECT_FALSE(hf.use_sliding_window) << type;
    EXPECT_EQ(hf.max_window_layers, 28) << type;
    EXPECT_EQ(hf.bos_token_id, std::nullopt) << type;
    EXPECT_THAT(hf.eos_token_ids, IsEmpty()) << type;
  }
  EXPECT_EQ(parse(llama_shape("qwen2")).head_dim, 64);
  EXPECT_EQ(parse(llama_shape("qwen3")).head_dim, 128);
  EXPECT_EQ(parse(with(llama_shape("qwen3"), "head_dim", 96)).head_dim, 96);
}

TEST(HfConfig, SlidingWindowFields) {
  json config = llama_shape("qwen2");
  config["use_sliding_window"] = true;
  config["sliding_window"] = 512;
  config["max_window_layers"] = 0;
  config["layer_types"] = {"sliding_attention", "full_attention"};
  const HfConfig hf = parse(config);
  EXPECT_TRUE(hf.use_sliding_window);
  EXPECT_EQ(hf.sliding_window, 512);
  EXPECT_EQ(hf.max_window_layers, 0);
  EXPECT_THAT(hf.layer_types, ElementsAre("sliding_attention", "full_attention"));
}

TEST(HfConfig, Gpt2AndItsDefaults) {
  const HfConfig hf = parse(gpt2_shape());
  EXPECT_EQ(hf.hidden_size, 768);
  EXPECT_EQ(hf.num_hidden_layers, 12);
  EXPECT_EQ(hf.num_attention_heads, 12);
  EXPECT_EQ(hf.num_key_value_heads, 12);
  EXPECT_EQ(hf.head_dim, 64);
  EXPECT_EQ(hf.intermediate_size, 3072);
  EXPECT_EQ(hf.max_position_embeddings, 1024);
  EXPECT_EQ(hf.norm_eps, 1e-5);
  EXPECT_EQ(hf.hidden_act, "gelu_new");
  EXPECT_TRUE(hf.tie_word_embeddings);
  EXPECT_EQ(hf.attention_dropout, 0.1);
  EXPECT_EQ(hf.resid_pdrop, 0.1);
  EXPECT_EQ(hf.embd_pdrop, 0.1);
  EXPECT_TRUE(hf.scale_attn_weights);
  EXPECT_FALSE(hf.scale_attn_by_inverse_layer_idx);
  EXPECT_EQ(hf.bos_token_id, 50256);
  EXPECT_THAT(hf.eos_token_ids, ElementsAre(50256));

  json other = gpt2_shape();
  other["n_inner"] = 100;
  other["resid_pdrop"] = 0;
  other["activation_function"] = "gelu";
  EXPECT_EQ(parse(other).intermediate_size, 100);
  EXPECT_EQ(parse(other).resid_pdrop, 0);
  EXPECT_EQ(parse(other).hidden_act, "gelu");
}

TEST(HfConfig, RopeScalingOfOldFiles) {
  json config = llama_shape();
  config["rope_theta"] = 500000.0;
  config["rope_scaling"] = {{"rope_type", "llama3"},
                            {"factor", 32.0},
                            {"low_freq_factor", 1.0},
                            {"high_freq_factor", 4.0},
                            {"original_max_position_embeddings", 4096}};
  const HfRope rope = parse(config).rope;
  EXPECT_EQ(rope.type, "llama3");
  EXPECT_EQ(rope.theta, 500000.0);
  EXPECT_EQ(rope.factor, 32.0);
  EXPECT_EQ(rope.low_freq_factor, 1.0);
  EXPECT_EQ(rope.high_freq_factor, 4.0);
  EXPECT_EQ(rope.original_max_position_embeddings, 4096);

  const HfRope oldest =
      parse(with(llama_shape(), "rope_scaling", {{"type", "linear"}, {"factor", 2}})).rope;
  EXPECT_EQ(oldest.type, "linear");
  EXPECT_EQ(oldest.factor, 2.0);
  EXPECT_EQ(parse(with(llama_shape(), "rope_scaling", nullptr)).rope.type, "default");
}

TEST(HfConfig, RopeParametersOfNewFiles) {
  json config = llama_shape();
  config["rope_theta"] = 1.0;  // the inner one wins
  config["rope_parameters"] = {{"rope_type", "yarn"}, {"rope_theta", 1e6},
                               {"factor", 4},         {"beta_fast", 32},
                               {"beta_slow", 1},      {"attention_factor", 1.5}};
  const HfRope rope = parse(config).rope;
  EXPECT_EQ(rope.type, "yarn");
  EXPECT_EQ(rope.theta, 1e6);
  EXPECT_EQ(rope.beta_fast, 32);
  EXPECT_EQ(rope.beta_slow, 1);
  EXPECT_EQ(rope.attention_factor, 1.5);
  EXPECT_EQ(rope.original_max_position_embeddings, 8192) << "max_position_embeddings";

  EXPECT_EQ(
      parse(with(llama_shape(), "rope_parameters", {{"rope_type", "default"}, {"rope_theta", 7.0}}))
          .rope.theta,
      7.0);
  EXPECT_THAT(refusal(with(llama_shape(), "rope_parameters",
                           {{"full_attention", {{"rope_type", "default"}}}})),
              HasSubstr("'rope_parameters.full_attention' must be a plain value"));
}

TEST(HfConfig, UnknownModelTypeNamesTheKnownOnes) {
  EXPECT_THAT(refusal(llama_shape("mamba")),
              HasSubstr("'model_type' is \"mamba\"; supported are llama, mistral, qwen2, qwen3, "
                        "gpt2"));
  EXPECT_THAT(refusal(without(llama_shape(), "model_type")), HasSubstr("'model_type' is missing"));
}

struct BadField {
  json config;
  std::string text;
};

TEST(HfConfig, EveryBadFieldIsNamedWithItsValue) {
  const json llama = llama_shape();
  const json gpt2 = gpt2_shape();
  std::vector<BadField> cases;
  for (const char* field : {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                            "num_attention_heads", "max_position_embeddings"}) {
    const std::string name = std::string("'") + field + "' ";
    cases.push_back({without(llama, field), name + "is missing"});
    cases.push_back({with(llama, field, nullptr), name + "must be an integer from 1 to"});
    cases.push_back({with(llama, field, "576"), "found \"576\""});
    cases.push_back({with(llama, field, 1.5), "found 1.5"});
    cases.push_back({with(llama, field, 0), "found 0"});
    cases.push_back({with(llama, field, -3), "found -3"});
    cases.push_back({with(llama, field, uint64_t{1} << 63), "found 9223372036854775808"});
    cases.push_back({with(llama, field, true), "found true"});
  }
  for (const char* field : {"vocab_size", "n_embd", "n_layer", "n_head", "n_positions"}) {
    cases.push_back({without(gpt2, field), std::string("'") + field + "' is missing"});
  }
  cases.push_back({with(llama, "num_key_value_heads", 0), "'num_key_value_heads'"});
  cases.push_back({with(llama, "head_dim", "64"), "'head_dim'"});
  cases.push_back({with(llama, "num_attention_heads", 7), "576 is not a multiple of 7"});
  cases.push_back({with(llama, "rms_norm_eps", 0), "'rms_norm_eps' must be a positive number"});
  cases.push_back({with(llama, "rms_norm_eps", "1e-5"), "'rms_norm_eps' must be a number"});
  cases.push_back({with(llama, "hidden_act", 3), "'hidden_act' must be a string, found 3"});
  cases.push_back({with(llama, "tie_word_embeddings", 1), "must be true or false, found 1"});
  cases.push_back({with(llama, "attention_dropout", 1.5), "'attention_dropout' must be a number"});
  cases.push_back({with(llama, "rope_theta", -1), "'rope_theta' must be a positive number"});
  cases.push_back({with(llama, "rope_scaling", 8), "'rope_scaling' must be a JSON object"});
  cases.push_back({with(llama, "rope_scaling", {{"factor", "2"}}), "'rope_scaling.factor'"});
  cases.push_back({with(llama, "sliding_window", 0), "'sliding_window'"});
  cases.push_back({with(llama, "layer_types", {1}), "'layer_types' must be a list of strings"});
  cases.push_back({with(llama, "eos_token_id", {1, "x"}), "'eos_token_id'"});
  cases.push_back({with(llama, "architectures", "Llama"), "'architectures'"});
  cases.push_back({with(gpt2, "embd_pdrop", -0.1), "'embd_pdrop' must be a number from 0"});
  cases.push_back({json(3), "must be a JSON object, found 3"});
  for (const BadField& bad : cases) {
    const std::string text = refusal(bad.config);
    EXPECT_THAT(text, HasSubstr("'config.json'")) << bad.config;
    EXPECT_THAT(text, HasSubstr(bad.text)) << bad.config;
  }
}

TEST(HfConfig, TextThatIsNoJson) {
  const auto text = [](const std::string& json) {
    return error_of(ErrorCode::kInvalidData, [&] { parse_hf_config(json, "config.json"); });
  };
  EXPECT_THAT(text(""), HasSubstr("no valid JSON"));
  EXPECT_THAT(text("{\"model_type\":\"llama\""), HasSubstr("no valid JSON at byte"));
  EXPECT_THAT(text(R"({"model_type":"llama","model_type":"gpt2"})"), HasSubstr("stands twice"));
  EXPECT_THAT(text(R"({"model_type":"llama","rms_norm_eps":1e999})"), HasSubstr("no valid JSON"));
}

TEST(HfConfig, AFolderWithoutConfigIsNoModel) {
  const TempFolder folder;
  EXPECT_THAT(error_of(ErrorCode::kInvalidData, [&] { read_hf_config(folder.path()); }),
              HasSubstr("no Hugging Face folder: it has no config.json"));
}

}  // namespace
}  // namespace orlop
