#include "tests/support/tiny_model.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>
#include <span>

#include "formats/hf_config.h"
#include "formats/safetensors_writer.h"
#include "model/param_layout.h"
#include "model/transformer_config.h"
#include "orlop/token_writer.h"
#include "tests/formats/support.h"

namespace orlop::test {
namespace {

int64_t uniform(std::mt19937_64& random, int64_t low, int64_t high) {
  return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
}

// In [-1, 1): the same numbers with every standard library.
float uniform_float(std::mt19937_64& random) {
  return static_cast<float>(static_cast<int64_t>(random() >> 40) - (int64_t{1} << 23)) * 0x1p-23f;
}

bool is_norm(TensorRole role) {
  return role == TensorRole::kAttentionNormWeight || role == TensorRole::kMlpNormWeight ||
         role == TensorRole::kFinalNormWeight || role == TensorRole::kQueryNormWeight ||
         role == TensorRole::kKeyNormWeight;
}

std::vector<float> random_weights(const Segment& segment, std::mt19937_64& random) {
  std::vector<float> values(static_cast<size_t>(segment.numel));
  const float center = is_norm(segment.role) ? 1.0f : 0.0f;
  for (float& value : values) value = center + 0.2f * uniform_float(random);
  return values;
}

}  // namespace

const char* family_name(TinyFamily family) {
  switch (family) {
    case TinyFamily::kLlama:
      return "llama";
    case TinyFamily::kLlamaTied:
      return "llama_tied";
    case TinyFamily::kQwen2:
      return "qwen2";
    case TinyFamily::kQwen3:
      return "qwen3";
    case TinyFamily::kGpt2:
      return "gpt2";
  }
  return "?";
}

std::string tiny_config(TinyFamily family, const TinyShape& shape) {
  if (family == TinyFamily::kGpt2) {
    return nlohmann::json{{"model_type", "gpt2"},
                          {"vocab_size", shape.vocab},
                          {"n_embd", shape.hidden},
                          {"n_layer", shape.layers},
                          {"n_head", shape.heads},
                          {"n_inner", shape.intermediate},
                          {"n_positions", shape.positions},
                          {"attn_pdrop", 0.0},
                          {"resid_pdrop", 0.0},
                          {"embd_pdrop", 0.0}}
        .dump(2);
  }
  nlohmann::json config = {{"model_type", "llama"},
                           {"vocab_size", shape.vocab},
                           {"hidden_size", shape.hidden},
                           {"intermediate_size", shape.intermediate},
                           {"num_hidden_layers", shape.layers},
                           {"num_attention_heads", shape.heads},
                           {"num_key_value_heads", shape.kv_heads},
                           {"head_dim", shape.hidden / shape.heads},
                           {"max_position_embeddings", shape.positions},
                           {"tie_word_embeddings", family == TinyFamily::kLlamaTied}};
  if (family == TinyFamily::kQwen2) config["model_type"] = "qwen2";
  if (family == TinyFamily::kQwen3) config["model_type"] = "qwen3";
  return config.dump(2);
}

void write_tiny_model(const std::filesystem::path& folder, TinyFamily family,
                      const TinyShape& shape, const EditTensor& edit) {
  std::filesystem::create_directories(folder);
  const std::string config = tiny_config(family, shape);
  spill(folder / "config.json", config);
  const ModelLayout layout =
      make_layout(make_transformer_config(parse_hf_config(config, "config.json")));
  std::vector<TensorSpec> specs;
  for (const FlatParamLayout& flat : layout.flat_params) {
    for (const Segment& segment : flat.segments) {
      specs.push_back({segment.name, DType::kF32, segment.shape});
    }
  }
  std::mt19937_64 random(1);
  SafetensorsWriter writer(folder / "model.safetensors", specs, {{"format", "pt"}});
  for (const FlatParamLayout& flat : layout.flat_params) {
    for (const Segment& segment : flat.segments) {
      std::vector<float> values = random_weights(segment, random);
      if (edit) edit(segment.name, values);
      writer.write(segment.name, 0, std::as_bytes(std::span(values)));
    }
  }
  writer.finish();
}

void write_tiny_tokens(const std::filesystem::path& path, int64_t vocab, int documents,
                       uint64_t seed) {
  std::mt19937_64 random(seed);
  TokenWriterConfig config;
  config.vocab_size = vocab;
  config.loss_mask = true;
  TokenWriter writer(path.string(), config);
  for (int document = 0; document < documents; ++document) {
    std::vector<int32_t> tokens(static_cast<size_t>(uniform(random, 1, 40)));
    std::vector<uint8_t> mask(tokens.size());
    for (int32_t& token : tokens) token = static_cast<int32_t>(uniform(random, 0, vocab - 1));
    for (uint8_t& counts : mask) counts = uniform(random, 0, 4) > 0;
    writer.append(tokens, mask);
  }
  writer.finish();
}

std::vector<MicroBatch> random_batches(int count, const BatchConfig& batch, int64_t vocab,
                                       uint64_t seed) {
  std::mt19937_64 random(seed);
  const int64_t rows = batch.micro_batch_size * batch.sequence_length;
  std::vector<MicroBatch> batches(static_cast<size_t>(count));
  for (MicroBatch& made : batches) {
    for (int64_t row = 0; row < rows; ++row) {
      made.tokens.push_back(static_cast<int32_t>(uniform(random, 0, vocab - 1)));
      const bool counts = uniform(random, 0, 4) > 0;
      made.labels.push_back(counts ? static_cast<int32_t>(uniform(random, 0, vocab - 1))
                                   : kIgnoredLabel);
    }
    made.cu_seqlens.push_back(0);
    while (made.cu_seqlens.back() < rows) {
      const int64_t begin = made.cu_seqlens.back();
      const int64_t longest = std::min(batch.sequence_length, rows - begin);
      made.cu_seqlens.push_back(static_cast<int32_t>(begin + uniform(random, 1, longest)));
    }
  }
  return batches;
}

}  // namespace orlop::test
