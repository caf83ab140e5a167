#include "tests/zero/plan_input.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

namespace orlop::test {

PlanInput small_input(int layers, int micro_batches, DType dtype) {
  TransformerConfig model;
  model.model_type = "llama";
  model.vocab_size = 512;
  model.hidden = 64;
  model.layers = layers;
  model.heads = 4;
  model.kv_heads = 2;
  model.head_dim = 16;
  model.intermediate = 128;
  model.max_positions = 64;
  model.tied_embeddings = true;
  PlanInput input;
  input.layout = make_layout(model);
  input.compute_dtype = dtype;
  input.shape = {32, 16};
  input.hidden = model.hidden;
  input.micro_batches = micro_batches;
  input.rope_bytes = 1024;
  for (const BlockLayout& block : input.layout.blocks) {
    const bool head = block.kind == BlockKind::kHead;
    input.forward_workspace_bytes.push_back(head ? 65536 : 32768);
    input.backward_workspace_bytes.push_back(head ? 65536 : 98304);
    input.forward_flops.push_back(1e6);
    input.attention_flops.push_back(0);
    input.forward_bytes.push_back(0);
  }
  for (const FlatParamLayout& flat : input.layout.flat_params) {
    input.norm_scratch_bytes.push_back(static_cast<size_t>(flat.numel / 4096 + 1) * sizeof(double));
  }
  return input;
}

PlacementPlan placement(const PlanInput& input, int prefetch, int wave) {
  PlacementPlan plan;
  plan.params.resize(input.layout.flat_params.size());
  plan.prefetch_depth = prefetch;
  plan.wave = wave;
  return plan;
}

void expect_golden(const std::string& text, const std::string& name) {
  const std::string path = fmt::format("{}/{}", ORLOP_GOLDEN_DIR, name);
  if (std::getenv("ORLOP_UPDATE_GOLDEN") != nullptr) std::ofstream(path) << text;
  std::ifstream in(path);
  ASSERT_TRUE(in) << path;
  std::stringstream golden;
  golden << in.rdbuf();
  EXPECT_EQ(text, golden.str());
}

}  // namespace orlop::test
