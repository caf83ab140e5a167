#include "model/param_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "formats/hf_config.h"
#include "model/block.h"

namespace orlop {
namespace {

TransformerConfig config_of(const std::string& json) {
  return make_transformer_config(parse_hf_config(json, "config.json"));
}

struct KnownModel {
  const char* name;
  const char* json;
  int64_t parameters;  // sum over parameters() in transformers
};

const KnownModel kModels[] = {
    {"SmolLM2-135M", R"({"model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
       "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
       "num_key_value_heads": 3, "max_position_embeddings": 8192, "tie_word_embeddings": true})",
     134515008},
    {"Llama-3-8B", R"({"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
       "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
       "num_key_value_heads": 8, "max_position_embeddings": 8192})",
     8030261248},
    {"Mistral-7B", R"({"model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096,
       "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
       "num_key_value_heads": 8, "max_position_embeddings": 32768})",
     7241732096},
    {"Qwen2.5-0.5B", R"({"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896,
       "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
       "num_key_value_heads": 2, "max_position_embeddings": 32768, "tie_word_embeddings": true})",
     494032768},
    {"Qwen3-0.6B", R"({"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
       "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
       "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
       "tie_word_embeddings": true})",
     596049920},
    {"GPT-2", R"({"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 768,
       "n_layer": 12, "n_head": 12, "attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0})",
     124439808},
    // Nothing a multiple of the alignment.
    {"odd", R"({"model_type": "llama", "vocab_size": 131, "hidden_size": 30,
       "intermediate_size": 37, "num_hidden_layers": 3, "num_attention_heads": 3,
       "num_key_value_heads": 1, "max_position_embeddings": 64, "attention_bias": true,
       "mlp_bias": true})",
     131 * 30 * 2 + 30 + 3 * (30 * 50 + 30 * 30 + 3 * 30 * 37 + 2 * 30 + 50 + 30 + 2 * 37 + 30)},
};

TEST(LayoutTest, CountsTheParametersOfKnownModels) {
  for (const KnownModel& model : kModels) {
    const ModelLayout layout = make_layout(config_of(model.json));
    EXPECT_EQ(layout.trainable_numel(), model.parameters) << model.name;
    EXPECT_GE(layout.numel(), layout.trainable_numel()) << model.name;
  }
}

bool is_aligned(int64_t offset) {
  return static_cast<size_t>(offset) * dtype_bytes(DType::kBF16) % kDeviceAlignment == 0;
}

TEST(LayoutTest, AlignsEveryOperandAndLeavesNoGapInside) {
  for (const KnownModel& model : kModels) {
    for (const FlatParamLayout& flat : make_layout(config_of(model.json)).flat_params) {
      SCOPED_TRACE(std::string(model.name) + ", " + flat.name);
      int64_t end = 0;
      const Segment* previous = nullptr;
      for (const Segment& segment : flat.segments) {
        if (previous != nullptr && previous->role == segment.role) {
          EXPECT_EQ(segment.offset, end) << segment.name << " does not continue its operand";
        } else {
          EXPECT_TRUE(is_aligned(segment.offset)) << segment.name << " at " << segment.offset;
          EXPECT_GE(segment.offset, end) << segment.name << " overlaps";
          EXPECT_LT(segment.offset - end, kGroupAlignment) << segment.name;
        }
        if (previous != nullptr) {
          EXPECT_LE(segment.decay, previous->decay) << segment.name << " breaks the order";
        }
        end = segment.offset + segment.numel;
        previous = &segment;
      }
      EXPECT_TRUE(is_aligned(flat.numel));
      EXPECT_GE(flat.numel, end);
      EXPECT_LT(flat.numel - end, kGroupAlignment);
    }
  }
}

TEST(LayoutTest, DecaysMatricesOnly) {
  for (const KnownModel& model : kModels) {
    for (const FlatParamLayout& flat : make_layout(config_of(model.json)).flat_params) {
      for (const Segment& segment : flat.segments) {
        EXPECT_EQ(segment.decay, segment.shape.size() == 2) << segment.name;
      }
    }
  }
}

std::vector<std::string> names(const FlatParamLayout& flat) {
  std::vector<std::string> result;
  for (const Segment& segment : flat.segments) result.push_back(segment.name);
  return result;
}

TEST(LayoutTest, NamesAndOrdersBlocksByFirstUse) {
  const ModelLayout layout = make_layout(config_of(kModels[4].json));  // Qwen3, tied
  ASSERT_EQ(layout.flat_params.size(), 30u);
  ASSERT_EQ(layout.blocks.size(), 30u);
  EXPECT_EQ(layout.flat_params.front().name, "embedding");
  EXPECT_EQ(layout.flat_params[1].name, "layer.0");
  EXPECT_EQ(layout.flat_params.back().name, "head");
  EXPECT_THAT(
      names(layout.flat_params[1]),
      testing::ElementsAre(
          "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight",
          "model.layers.0.self_attn.v_proj.weight", "model.layers.0.self_attn.o_proj.weight",
          "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight",
          "model.layers.0.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight",
          "model.layers.0.post_attention_layernorm.weight",
          "model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.k_norm.weight"));
  EXPECT_THAT(layout.blocks.front().flat_params, testing::ElementsAre(0));
  EXPECT_THAT(layout.blocks[5].flat_params, testing::ElementsAre(5));
  EXPECT_THAT(layout.blocks.back().flat_params, testing::ElementsAre(29, 0));
  EXPECT_THAT(names(layout.flat_params.back()), testing::ElementsAre("model.norm.weight"));
}

TEST(LayoutTest, AnUntiedHeadOwnsItsMatrix) {
  const ModelLayout layout = make_layout(config_of(kModels[1].json));
  EXPECT_THAT(names(layout.flat_params.back()),
              testing::ElementsAre("lm_head.weight", "model.norm.weight"));
  EXPECT_THAT(layout.blocks.back().flat_params, testing::ElementsAre(33));
}

TEST(LayoutTest, LearnedPositionsBelongToTheEmbedding) {
  const ModelLayout layout = make_layout(config_of(kModels[5].json));
  EXPECT_THAT(names(layout.flat_params.front()),
              testing::ElementsAre("transformer.wte.weight", "transformer.wpe.weight"));
}

TEST(LayoutTest, KnowsTheNamesOfOtherExports) {
  const ModelLayout gpt2 = make_layout(config_of(kModels[5].json));
  EXPECT_THAT(gpt2.names_in_file("transformer.h.0.ln_1.weight"),
              testing::ElementsAre("transformer.h.0.ln_1.weight", "h.0.ln_1.weight"));
  EXPECT_TRUE(gpt2.is_passed_over("h.0.attn.bias"));
  EXPECT_TRUE(gpt2.is_passed_over("transformer.h.11.attn.masked_bias"));
  EXPECT_TRUE(gpt2.is_passed_over("lm_head.weight"));
  EXPECT_FALSE(gpt2.is_passed_over("h.0.attn.c_attn.bias"));

  const ModelLayout llama = make_layout(config_of(kModels[1].json));
  EXPECT_THAT(llama.names_in_file("lm_head.weight"), testing::ElementsAre("lm_head.weight"));
  EXPECT_THAT(llama.names_in_file("model.norm.weight"),
              testing::ElementsAre("model.norm.weight", "norm.weight"));
  EXPECT_TRUE(llama.is_passed_over("model.layers.0.self_attn.rotary_emb.inv_freq"));
  EXPECT_FALSE(llama.is_passed_over("lm_head.weight"));
}

TEST(FlopsTest, CountsWeightsTwicePerTokenAndAttentionBelowTheDiagonal) {
  for (const KnownModel& model : kModels) {
    const TransformerConfig config = config_of(model.json);
    const FlatParamLayout layer = make_layout(config).flat_params[1];
    const BatchShape shape{48, 16};
    double want = 0;
    for (const Segment& segment : layer.segments) {
      if (segment.shape.size() == 2) want += 2.0 * 48 * static_cast<double>(segment.numel);
    }
    for (int64_t sequence = 0; sequence < 3; ++sequence) {
      for (int64_t row = 0; row < 16; ++row) {
        want += 2.0 * 2.0 * static_cast<double>(config.q_width() * (row + 1));
      }
    }
    EXPECT_DOUBLE_EQ(block_forward_flops(config, BlockKind::kTransformer, shape), want)
        << model.name;
    EXPECT_DOUBLE_EQ(block_forward_flops(config, BlockKind::kHead, shape),
                     2.0 * 48 * static_cast<double>(config.hidden * config.vocab_size));
    EXPECT_EQ(block_forward_flops(config, BlockKind::kEmbedding, shape), 0);
  }
}

}  // namespace
}  // namespace orlop
