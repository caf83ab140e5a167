#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "orlop/config.h"
#include "orlop/engine.h"

namespace orlop::test {

// The families of models that the engine reads, and what tells them apart.
enum class TinyFamily { kLlama, kLlamaTied, kQwen2, kQwen3, kGpt2 };

const char* family_name(TinyFamily family);

struct TinyShape {
  int64_t vocab = 61;
  int64_t hidden = 32;
  int64_t layers = 3;
  int64_t heads = 4;
  int64_t kv_heads = 2;
  int64_t intermediate = 48;
  int64_t positions = 48;
};

// The text of a config.json.
std::string tiny_config(TinyFamily family, const TinyShape& shape = {});

// Writes config.json and model.safetensors (fp32, random, norms near 1) into `folder`; `edit` may
// change any tensor before it is written.
using EditTensor = std::function<void(const std::string& name, std::vector<float>& values)>;
void write_tiny_model(const std::filesystem::path& folder, TinyFamily family,
                      const TinyShape& shape = {}, const EditTensor& edit = {});

// Writes a token file of `documents` random documents of 1 to 40 tokens with a loss mask.
void write_tiny_tokens(const std::filesystem::path& path, int64_t vocab, int documents,
                       uint64_t seed = 1);

// `count` random micro-batches: packed documents, about a fifth of the labels ignored.
std::vector<MicroBatch> random_batches(int count, const BatchConfig& batch, int64_t vocab,
                                       uint64_t seed);

}  // namespace orlop::test
