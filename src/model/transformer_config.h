#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/ops.h"

namespace orlop {

// Rotary embedding: inverse frequencies per pair, with any scaling (Llama 3, linear) already
// applied.
struct RopeConfig {
  bool enabled = false;
  double theta = 10000.0;
  int64_t rotary_dim = 0;              // elements of a head that rotate; even
  std::vector<float> inv_frequencies;  // (rotary_dim / 2)
};

// What a decoder-only model is, independent of where it came from.
struct TransformerConfig {
  std::string model_type;  // "llama", "qwen2", "gpt2", ...
  std::string file;        // config.json, for errors
  int64_t vocab_size = 0;
  int64_t hidden = 0;
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t intermediate = 0;
  int64_t max_positions = 0;
  int64_t sliding_window = 0;  // tokens a token may look back to, itself included; 0: all
  float norm_eps = 1e-5f;
  bool layer_norm = false;  // LayerNorm with bias; else RMSNorm
  Activation activation = Activation::kSwiGlu;
  bool qkv_bias = false;
  bool attention_out_bias = false;
  bool mlp_bias = false;
  bool qk_norm = false;            // RMSNorm on every query and key head (Qwen3)
  bool learned_positions = false;  // GPT-2
  bool tied_embeddings = false;
  bool transposed_linear = false;  // GPT-2: Conv1D weights stored (in, out), fused qkv, its names
  RopeConfig rope;

  int64_t q_width() const { return heads * head_dim; }
  int64_t kv_width() const { return kv_heads * head_dim; }
  int64_t qkv_width() const { return q_width() + 2 * kv_width(); }
  float attention_scale() const;
};

struct HfConfig;

// Throws Error(kInvalidData) that names file and field for an architecture, activation, rope type,
// dropout or sliding window that the blocks do not implement.
TransformerConfig make_transformer_config(const HfConfig& hf);

// Throws Error(kUsage) that names file and field when the model cannot take sequences of
// `tokens`: longer than its positions, or than a sliding window, within which attention is plain
// causal.
void check_sequence_length(const TransformerConfig& config, int64_t tokens);

// cos and sin for positions [0, max_position): (max_position, rotary_dim / 2, 2) fp32.
std::vector<float> rope_table(const RopeConfig& rope, int64_t max_position);

}  // namespace orlop
