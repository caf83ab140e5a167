// Loss and every gradient against transformers, on models and data that make_golden.py wrote.

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <set>
#include <string>
#include <tuple>

#include "formats/hf_config.h"
#include "model_runner.h"

namespace orlop {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMaxRows = 48;

struct Difference {
  double relative = 0;  // |got - want| / |want|, Frobenius
  size_t worst = 0;
};

Difference compare(std::span<const float> got, std::span<const float> want) {
  Difference result;
  double squares = 0, reference = 0, worst = -1;
  for (size_t i = 0; i < want.size(); ++i) {
    const double off = static_cast<double>(got[i]) - want[i];
    squares += off * off;
    reference += static_cast<double>(want[i]) * want[i];
    if (!(std::abs(off) <= worst)) {
      worst = std::abs(off);
      result.worst = i;
    }
  }
  result.relative = std::sqrt(squares / reference);
  return result;
}

double mean_loss(const std::vector<float>& rows, const TestBatch& batch) {
  double sum = 0;
  for (const float loss : rows) sum += loss;
  return sum / static_cast<double>(batch.labelled());
}

class ParityTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    folder_ = fs::path(ORLOP_GOLDEN_DIR) / GetParam();
    if (!fs::exists(folder_ / "reference.safetensors")) {
      GTEST_SKIP() << folder_ << " is missing: make_golden.py needs torch and transformers";
    }
    config_ = make_transformer_config(read_hf_config(folder_));
    weights_ = std::make_unique<SafetensorsReader>(folder_ / "model.safetensors");
    reference_ = std::make_unique<SafetensorsReader>(folder_ / "reference.safetensors");
  }

  TestBatch batch(const std::string& name) const {
    return {read_ints(*reference_, name + ".tokens"), read_ints(*reference_, name + ".labels"),
            read_ints(*reference_, name + ".positions"),
            read_ints(*reference_, name + ".cu_seqlens")};
  }

  double wanted_loss(const std::string& name) const {
    return mean_loss(read_floats(*reference_, name + ".row_loss"), batch(name));
  }

  // Without rotation a key bias shifts all scores of a row alike: its true gradient is zero, what
  // is computed is rounding. Cut out of the fused c_attn bias; the rest of it is compared.
  std::vector<float> comparable(const std::string& name, std::vector<float> gradient) const {
    if (!config_.rope.enabled && name.ends_with("c_attn.bias")) {
      const auto keys = gradient.begin() + config_.q_width();
      gradient.erase(keys, keys + config_.kv_width());
    }
    return gradient;
  }

  void expect_gradients(const ModelRunner& model, const std::string& batch, double factor,
                        double tolerance) {
    double worst = 0;
    for (const FlatParamLayout& flat : model.layout().flat_params) {
      for (const Segment& segment : flat.segments) {
        std::vector<float> want =
            comparable(segment.name, read_floats(*reference_, batch + ".grad." + segment.name));
        for (float& value : want) value = static_cast<float>(value * factor);
        const std::vector<float> got = comparable(segment.name, model.grad(segment.name));
        const Difference off = compare(got, want);
        EXPECT_LE(off.relative, tolerance)
            << batch << ", " << segment.name << ": worst at " << off.worst << ", got "
            << got[off.worst] << ", want " << want[off.worst];
        worst = std::max(worst, off.relative);
      }
    }
    RecordProperty(batch + "_worst_gradient", std::to_string(worst));
    std::printf("  %-7s worst gradient %.2e relative\n", batch.c_str(), worst);
  }

  void expect_parity(DType dtype, bool reference_ops, double loss_tolerance,
                     double gradient_tolerance) {
    ModelRunner model(config_, dtype, reference_ops, kMaxRows);
    model.load(*weights_);
    for (const std::string name : {"plain", "packed"}) {
      const TestBatch data = batch(name);
      model.zero_grads();
      const float scale = 1.0f / static_cast<float>(data.labelled());
      const std::vector<float> loss = model.forward_backward(data, scale);
      const double want = wanted_loss(name);
      EXPECT_NEAR(mean_loss(loss, data), want, loss_tolerance * want) << name;
      expect_gradients(model, name, 1.0, gradient_tolerance);
      EXPECT_EQ(model.forward(data), loss) << "forward alone gives other losses, " << name;
    }
    EXPECT_TRUE(model.gaps_are_zero());
  }

  fs::path folder_;
  TransformerConfig config_;
  std::unique_ptr<SafetensorsReader> weights_, reference_;
};

TEST_P(ParityTest, Fp32ReferenceOps) { expect_parity(DType::kF32, true, 1e-5, 1e-4); }
TEST_P(ParityTest, Fp32HostOps) { expect_parity(DType::kF32, false, 1e-5, 1e-4); }
TEST_P(ParityTest, Bf16HostOps) { expect_parity(DType::kBF16, false, 1e-2, 5e-2); }

TEST_P(ParityTest, RowLossesMatchAndIgnoredRowsAreZero) {
  ModelRunner model(config_, DType::kF32, true, kMaxRows);
  model.load(*weights_);
  const TestBatch data = batch("packed");
  const std::vector<float> got = model.forward(data);
  const std::vector<float> want = read_floats(*reference_, "packed.row_loss");
  for (size_t row = 0; row < want.size(); ++row) {
    EXPECT_NEAR(got[row], want[row], 1e-5 * std::max(1.0f, want[row])) << "row " << row;
    if (data.labels[row] < 0) {
      EXPECT_EQ(got[row], 0.0f) << "row " << row;
    }
  }
}

TEST_P(ParityTest, MicroBatchesAccumulate) {
  ModelRunner model(config_, DType::kF32, true, kMaxRows);
  model.load(*weights_);
  const TestBatch data = batch("packed");
  // The documents of the batch one by one, then the whole batch again: twice the gradient.
  const float scale = 1.0f / static_cast<float>(data.labelled());
  for (size_t d = 0; d + 1 < data.cu_seqlens.size(); ++d) {
    const auto cut = [&](const std::vector<int32_t>& rows) {
      return std::vector<int32_t>(rows.begin() + data.cu_seqlens[d],
                                  rows.begin() + data.cu_seqlens[d + 1]);
    };
    const int32_t length = data.cu_seqlens[d + 1] - data.cu_seqlens[d];
    model.forward_backward({cut(data.tokens), cut(data.labels), cut(data.positions), {0, length}},
                           scale);
  }
  expect_gradients(model, "packed", 1.0, 1e-4);
  model.forward_backward(data, scale);
  expect_gradients(model, "packed", 2.0, 1e-4);
}

TEST_P(ParityTest, LayoutHoldsExactlyTheTensorsOfTheFile) {
  const ModelLayout layout = make_layout(config_);
  std::set<std::string> in_file, in_layout;
  for (const TensorInfo& tensor : weights_->tensors()) in_file.insert(tensor.name);
  for (const FlatParamLayout& flat : layout.flat_params) {
    for (const Segment& segment : flat.segments) {
      in_layout.insert(segment.name);
      const TensorInfo* tensor = weights_->find(segment.name);
      ASSERT_NE(tensor, nullptr) << segment.name;
      EXPECT_EQ(tensor->shape, segment.shape) << segment.name;
    }
  }
  EXPECT_EQ(in_layout, in_file);
  EXPECT_EQ(std::to_string(layout.trainable_numel()), reference_->metadata().at("parameters"));
}

TEST_P(ParityTest, RopeTableMatches) {
  if (!config_.rope.enabled) {
    EXPECT_TRUE(rope_table(config_.rope, 8).empty());
    return;
  }
  const std::vector<float> table = rope_table(config_.rope, config_.max_positions);
  const std::vector<float> cos = read_floats(*reference_, "rope.cos");
  const std::vector<float> sin = read_floats(*reference_, "rope.sin");
  ASSERT_EQ(table.size(), cos.size() + sin.size());
  for (size_t i = 0; i < cos.size(); ++i) {
    // Angles go up to 63; an ulp of such an angle is 4e-6.
    ASSERT_NEAR(table[2 * i], cos[i], 8e-6) << i;
    ASSERT_NEAR(table[2 * i + 1], sin[i], 8e-6) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, ParityTest,
                         testing::Values("llama", "llama_tied", "llama_mha", "llama_bias",
                                         "llama_head_dim", "llama3_rope", "linear_rope", "mistral",
                                         "qwen2", "qwen2_tied", "qwen3", "qwen3_tied", "gpt2",
                                         "gpt2_untied"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace orlop
