#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>

#include "formats/hf_config.h"
#include "model/transformer_config.h"
#include "orlop/error.h"

namespace orlop {
namespace {

using nlohmann::json;

json llama_json(const std::string& model_type = "llama") {
  return {{"model_type", model_type}, {"vocab_size", 100},      {"hidden_size", 64},
          {"intermediate_size", 96},  {"num_hidden_layers", 4}, {"num_attention_heads", 4},
          {"num_key_value_heads", 2}, {"head_dim", 16},         {"max_position_embeddings", 64}};
}

json gpt2_json() {
  return {{"model_type", "gpt2"}, {"vocab_size", 100}, {"n_positions", 64},
          {"n_embd", 64},         {"n_layer", 2},      {"n_head", 4},
          {"attn_pdrop", 0},      {"resid_pdrop", 0},  {"embd_pdrop", 0}};
}

TransformerConfig config_of(const json& config) {
  return make_transformer_config(parse_hf_config(config.dump(), "some/config.json"));
}

json with(json config, const json& changes) {
  config.update(changes);
  return config;
}

void expect_refused(const json& config, const std::string& field) {
  try {
    config_of(config);
    FAIL() << "accepted " << config.dump();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidData);
    EXPECT_THAT(error.what(), testing::HasSubstr(field));
    EXPECT_THAT(error.what(), testing::HasSubstr("some/config.json"));
  }
}

TEST(TransformerConfigTest, TakesShapesAndFamilyTraits) {
  const TransformerConfig llama = config_of(llama_json());
  EXPECT_EQ(llama.qkv_width(), 64 + 2 * 32);
  EXPECT_FLOAT_EQ(llama.attention_scale(), 0.25f);
  EXPECT_TRUE(llama.rope.enabled);
  EXPECT_FALSE(llama.qkv_bias || llama.qk_norm || llama.layer_norm || llama.tied_embeddings);

  const TransformerConfig biased = config_of(with(llama_json(), {{"attention_bias", true}}));
  EXPECT_TRUE(biased.qkv_bias && biased.attention_out_bias && !biased.mlp_bias);

  const TransformerConfig qwen2 = config_of(llama_json("qwen2"));
  EXPECT_TRUE(qwen2.qkv_bias && !qwen2.attention_out_bias);

  const TransformerConfig qwen3 = config_of(llama_json("qwen3"));
  EXPECT_TRUE(qwen3.qk_norm && !qwen3.qkv_bias);

  const TransformerConfig gpt2 = config_of(gpt2_json());
  EXPECT_TRUE(gpt2.layer_norm && gpt2.learned_positions && gpt2.transposed_linear &&
              gpt2.tied_embeddings && gpt2.qkv_bias && !gpt2.rope.enabled);
  EXPECT_EQ(gpt2.activation, Activation::kGeluTanh);
  EXPECT_EQ(gpt2.intermediate, 256);
}

TEST(TransformerConfigTest, RefusesDropoutByName) {
  expect_refused(with(llama_json(), {{"attention_dropout", 0.1}}), "attention_dropout");
  for (const char* field : {"attn_pdrop", "resid_pdrop", "embd_pdrop"}) {
    expect_refused(with(gpt2_json(), {{field, 0.1}}), field);
  }
}

TEST(TransformerConfigTest, RefusesWhatBlocksDoNotCompute) {
  expect_refused(with(llama_json(), {{"hidden_act", "relu"}}), "hidden_act");
  expect_refused(with(gpt2_json(), {{"activation_function", "relu"}}), "activation_function");
  expect_refused(with(gpt2_json(), {{"scale_attn_weights", false}}), "scale_attn_weights");
  expect_refused(with(gpt2_json(), {{"scale_attn_by_inverse_layer_idx", true}}),
                 "scale_attn_by_inverse_layer_idx");
  expect_refused(with(gpt2_json(), {{"add_cross_attention", true}}), "add_cross_attention");
  expect_refused(with(llama_json(), {{"num_key_value_heads", 3}}), "num_key_value_heads");
  expect_refused(with(llama_json(), {{"head_dim", 15}}), "head_dim");
  expect_refused(with(llama_json(), {{"architectures", {"LlamaForSequenceClassification"}}}),
                 "architectures");
  expect_refused(with(llama_json("qwen3"), {{"layer_types", {"chunked_attention"}}}),
                 "layer_types");
}

TEST(TransformerConfigTest, RefusesRopeItDoesNotCompute) {
  const auto rope = [](const json& parameters) {
    return with(llama_json(), {{"rope_parameters", parameters}});
  };
  for (const char* type : {"yarn", "dynamic", "longrope", "surprise"}) {
    expect_refused(rope({{"rope_type", type}, {"factor", 2.0}}), type);
  }
  expect_refused(rope({{"rope_type", "linear"}}), "factor");
  expect_refused(rope({{"rope_type", "llama3"}, {"factor", 8.0}}), "low_freq_factor");
  expect_refused(rope({{"rope_type", "llama3"},
                       {"factor", 8.0},
                       {"low_freq_factor", 4.0},
                       {"high_freq_factor", 1.0}}),
                 "high_freq_factor");
  expect_refused(rope({{"rope_type", "default"}, {"partial_rotary_factor", 0.5}}),
                 "partial_rotary_factor");
}

TEST(TransformerConfigTest, LetsSequencesFillTheWindowAndNoMore) {
  const auto refused = [](const TransformerConfig& config, int64_t tokens,
                          const std::string& field) {
    EXPECT_NO_THROW(check_sequence_length(config, tokens - 1));
    try {
      check_sequence_length(config, tokens);
      FAIL() << tokens << " tokens were accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUsage);
      EXPECT_THAT(error.what(), testing::HasSubstr(field));
    }
  };
  refused(config_of(llama_json()), 65, "max_position_embeddings");
  refused(config_of(gpt2_json()), 65, "n_positions");

  const json window = {{"sliding_window", 32}};
  refused(config_of(with(llama_json("mistral"), window)), 33, "sliding_window");
  refused(config_of(with(llama_json("mistral"), {{"sliding_window", nullptr}})), 65,
          "max_position_embeddings");
  // Qwen's window counts only when it is switched on and some layer uses it.
  refused(config_of(with(llama_json("qwen2"), window)), 65, "max_position_embeddings");
  json on = with(llama_json("qwen2"), window);
  on["use_sliding_window"] = true;
  on["max_window_layers"] = 2;
  refused(config_of(on), 33, "sliding_window");
  on["max_window_layers"] = 4;
  refused(config_of(on), 65, "max_position_embeddings");
  on["layer_types"] = {"full_attention", "sliding_attention", "full_attention", "full_attention"};
  refused(config_of(on), 33, "sliding_window");
}

TEST(RopeTableTest, HoldsCosAndSinOfEveryPosition) {
  RopeConfig rope;
  rope.enabled = true;
  rope.rotary_dim = 4;
  rope.inv_frequencies = {1.0f, 0.25f};
  const std::vector<float> table = rope_table(rope, 3);
  ASSERT_EQ(table.size(), 3u * 2 * 2);
  for (size_t position = 0; position < 3; ++position) {
    for (size_t pair = 0; pair < 2; ++pair) {
      const double angle = static_cast<double>(position) * rope.inv_frequencies[pair];
      EXPECT_FLOAT_EQ(table[(position * 2 + pair) * 2], static_cast<float>(std::cos(angle)));
      EXPECT_FLOAT_EQ(table[(position * 2 + pair) * 2 + 1], static_cast<float>(std::sin(angle)));
    }
  }
}

}  // namespace
}  // namespace orlop
