// The head on more rows than one chunk holds.

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "base/bytes.h"
#include "formats/hf_config.h"
#include "host/host_backend.h"
#include "model/block.h"
#include "model/workspace.h"

namespace orlop {
namespace {

constexpr int64_t kHidden = 24, kVocab = 37;

class HeadTest : public testing::Test {
 protected:
  HeadTest()
      : config_(make_transformer_config(parse_hf_config(R"({"model_type": "llama",
            "vocab_size": 37, "hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "max_position_embeddings": 4096})",
                                                        "config.json"))),
        layout_(make_layout(config_)),
        backend_(
            make_host_backend({.device_bytes = 64 * kMiB, .threads = 1, .reference_ops = true})),
        head_(make_block(config_, layout_, 2, DType::kF32)),
        params_(static_cast<size_t>(layout_.flat_params[2].numel)) {
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    for (const Segment& segment : layout_.flat_params[2].segments) {
      for (int64_t i = 0; i < segment.numel; ++i) at(params_, segment.offset + i) = normal(random);
    }
    for (int64_t row = 0; row < kRows; ++row) {
      labels_.push_back(row % 7 == 3 ? -100 : static_cast<int32_t>(row * 5 % kVocab));
      for (int64_t c = 0; c < kHidden; ++c) input_.push_back(normal(random));
    }
  }

  static float& at(std::vector<float>& v, int64_t i) { return v[static_cast<size_t>(i)]; }

  struct Result {
    std::vector<float> loss = std::vector<float>(kRows);
    std::vector<float> grad = std::vector<float>(kRows * kHidden);
    std::vector<float> dparams;
  };

  // Adds the rows [begin, end) to `result` in one call.
  void run(int64_t begin, int64_t end, Result& result) {
    BatchView batch;
    batch.labels = labels_.data() + begin;
    batch.rows = end - begin;
    batch.loss = result.loss.data() + begin;
    const float scale = 0.125f;
    batch.scale = &scale;
    result.dparams.resize(params_.size());
    const void* params[] = {params_.data()};
    float* grads[] = {result.dparams.data()};
    const size_t bytes = head_->workspace_bytes(backend_->ops(), {batch.rows, batch.rows}, true);
    std::vector<std::byte> workspace(bytes + kDeviceAlignment);
    const auto address = reinterpret_cast<uintptr_t>(workspace.data());
    const BlockCall call{
        backend_->ops(), backend_->queue(QueueKind::kCompute),
        batch,           params,
        grads,           reinterpret_cast<void*>(align_up(address, kDeviceAlignment)),
        nullptr};
    head_->backward(call, input_.data() + begin * kHidden, result.grad.data() + begin * kHidden);
    call.queue.synchronize();
  }

  static constexpr int64_t kRows = 2500;
  TransformerConfig config_;
  ModelLayout layout_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Block> head_;
  std::vector<float> params_, input_;
  std::vector<int32_t> labels_;
};

TEST_F(HeadTest, ChunksGiveTheBitsOfSeparateBatches) {
  const int64_t chunk = backend_->ops().head_chunk_rows(kVocab, DType::kF32);
  ASSERT_LT(2 * chunk, kRows) << "the rows must fill more than two chunks";
  Result whole, parts;
  run(0, kRows, whole);
  for (int64_t row = 0; row < kRows; row += chunk) run(row, std::min(kRows, row + chunk), parts);
  EXPECT_EQ(whole.loss, parts.loss);
  EXPECT_EQ(whole.grad, parts.grad);
  const Segment& logits = *layout_.flat_params[2].find(TensorRole::kLogitsWeight);
  const Segment& norm = *layout_.flat_params[2].find(TensorRole::kFinalNormWeight);
  for (int64_t i = 0; i < logits.numel; ++i) {
    ASSERT_EQ(at(whole.dparams, logits.offset + i), at(parts.dparams, logits.offset + i)) << i;
  }
  for (int64_t i = 0; i < norm.numel; ++i) {
    const float want = at(parts.dparams, norm.offset + i);
    ASSERT_NEAR(at(whole.dparams, norm.offset + i), want, 1e-5f * std::abs(want) + 1e-5f) << i;
  }
}

TEST_F(HeadTest, LossIsTheCrossEntropyOfNormedRows) {
  Result result;
  run(0, kRows, result);
  const Segment& logits = *layout_.flat_params[2].find(TensorRole::kLogitsWeight);
  const Segment& norm = *layout_.flat_params[2].find(TensorRole::kFinalNormWeight);
  for (int64_t row = 0; row < kRows; ++row) {
    const int32_t label = labels_[static_cast<size_t>(row)];
    double squares = 0, denominator = 0, at_label = 0;
    for (int64_t c = 0; c < kHidden; ++c) {
      squares += std::pow(static_cast<double>(at(input_, row * kHidden + c)), 2);
    }
    const double rstd = 1 / std::sqrt(squares / kHidden + static_cast<double>(config_.norm_eps));
    for (int64_t v = 0; v < kVocab; ++v) {
      double logit = 0;
      for (int64_t c = 0; c < kHidden; ++c) {
        logit += static_cast<double>(at(input_, row * kHidden + c)) * rstd *
                 static_cast<double>(at(params_, norm.offset + c)) *
                 static_cast<double>(at(params_, logits.offset + v * kHidden + c));
      }
      denominator += std::exp(logit);
      if (v == label) at_label = logit;
    }
    const double want = label < 0 ? 0 : std::log(denominator) - at_label;
    ASSERT_NEAR(at(result.loss, row), want, 1e-5 * std::max(1.0, want)) << "row " << row;
  }
}

TEST_F(HeadTest, WorkspaceHoldsOneChunkOfLogitsForAnyNumberOfRows) {
  const Ops& ops = backend_->ops();
  const int64_t chunk = ops.head_chunk_rows(kVocab, DType::kF32);
  const size_t small = head_->workspace_bytes(ops, {chunk, chunk}, true);
  const size_t large = head_->workspace_bytes(ops, {64 * chunk, 64}, true);
  // Only the norm's statistics grow.
  EXPECT_EQ(large - small, static_cast<size_t>(63 * chunk) * sizeof(float));
}

}  // namespace
}  // namespace orlop
