#include "model/workspace.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "formats/hf_config.h"
#include "host/host_backend.h"
#include "model/block.h"

namespace orlop {
namespace {

TEST(WorkspaceTest, SharesMemoryAfterRewindAndCountsThePeak) {
  Workspace workspace(reinterpret_cast<void*>(0x10000));
  void* kept = workspace.take_bytes(1);
  const size_t mark = workspace.mark();
  void* first = workspace.take(100, DType::kF32);
  workspace.rewind(mark);
  void* second = workspace.take_bytes(10);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(kept), 0x10000u);
  EXPECT_EQ(first, second);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first), 0x10000u + kDeviceAlignment);
  EXPECT_EQ(workspace.peak_bytes(), kDeviceAlignment + 512);
}

// The formula in transformer_block.h, in elements of a row, on shapes that need no rounding up.
TEST(WorkspaceTest, DecoderLayerNeedsWhatItsFormulaSays) {
  const char* models[] = {
      R"({"model_type": "llama", "vocab_size": 1024, "hidden_size": 4096, "num_hidden_layers": 1,
          "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
          "max_position_embeddings": 4096})",
      R"({"model_type": "qwen3", "vocab_size": 1024, "hidden_size": 1024, "num_hidden_layers": 1,
          "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
          "head_dim": 128, "max_position_embeddings": 4096})",
      R"({"model_type": "gpt2", "vocab_size": 1024, "n_embd": 1024, "n_layer": 1, "n_head": 16,
          "n_positions": 4096, "attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0})",
      // Wider attention than MLP.
      R"({"model_type": "llama", "vocab_size": 1024, "hidden_size": 1024, "num_hidden_layers": 1,
          "intermediate_size": 512, "num_attention_heads": 32, "num_key_value_heads": 32,
          "head_dim": 128, "max_position_embeddings": 4096})"};
  const auto backend =
      make_host_backend({.device_bytes = 64 * kMiB, .threads = 1, .reference_ops = true});
  const Ops& ops = backend->ops();
  for (const char* json : models) {
    const TransformerConfig c = make_transformer_config(parse_hf_config(json, "config.json"));
    const auto block = make_block(c, make_layout(c), 1, DType::kBF16);
    const BatchShape shape{512, 256};
    const auto attention = [&](bool backward) {
      const AttentionShape attention_shape{shape.rows,         c.heads,      c.kv_heads, c.head_dim,
                                           shape.max_sequence, DType::kBF16, backward};
      return align_up(ops.attention_workspace_bytes(attention_shape), kDeviceAlignment);
    };
    const auto rows16 = [&](int64_t elements) {
      return static_cast<size_t>(shape.rows * elements) * 2;
    };
    const auto rows32 = [&](int64_t elements) {
      return static_cast<size_t>(shape.rows * elements) * 4;
    };
    const int64_t Q = c.q_width(), QKV = c.qkv_width(), D = c.hidden, I = c.intermediate;
    const int64_t A = c.activation == Activation::kSwiGlu ? 2 * I : I;
    const int64_t norm = c.layer_norm ? 2 : 1;
    const size_t kept = rows16(QKV * (c.qk_norm ? 2 : 1)) +
                        rows32(c.heads + (c.qk_norm ? c.heads + c.kv_heads : 0));

    EXPECT_EQ(
        block->workspace_bytes(ops, shape, false),
        rows32(norm) + rows16(std::max(D, Q)) + std::max(kept + attention(false), rows16(A + I)))
        << c.model_type;
    EXPECT_EQ(block->workspace_bytes(ops, shape, true),
              kept + rows16(Q) + rows32(2 * norm) +
                  std::max({attention(false), rows16(D + A + std::max(I, D)),
                            rows16(QKV) + std::max(rows16(Q) + attention(true), rows16(2 * D))}))
        << c.model_type;
  }
}

}  // namespace
}  // namespace orlop
