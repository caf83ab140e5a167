#include <cmath>

#include "base/check.h"
#include "ops_suite.h"

namespace orlop::test {
namespace {

struct NamedAttention {
  const char* name;
  AttentionCase shape;
};

std::vector<NamedAttention> attention_cases() {
  const auto scale = [](int64_t head_dim) {
    return 1.0 / std::sqrt(static_cast<double>(head_dim));
  };
  return {{"one token", {{0, 1}, 1, 1, 64, scale(64)}},
          {"one row each", {{0, 1, 2, 3}, 4, 2, 64, scale(64)}},
          {"smollm group of 3", {{0, 70, 71, 200}, 9, 3, 64, scale(64)}},
          {"multi-head, exact blocks", {{0, 64, 192}, 4, 4, 64, scale(64)}},
          {"multi-query, head of 128", {{0, 65, 130}, 4, 1, 128, scale(128)}},
          {"head of 72", {{0, 63, 150}, 2, 1, 72, scale(72)}},
          {"head of 80", {{0, 129}, 2, 2, 80, scale(80)}},
          {"small head, empty sequence", {{0, 20, 20, 90}, 2, 2, 8, 0.7}}};
}

// q, k and v as the blocks keep them: side by side in rows of one matrix.
class PackedAttention {
 public:
  PackedAttention(TestDevice& device, const AttentionCase& shape, DType dtype)
      : device_(device), shape_(shape), dtype_(dtype) {}

  int64_t q_width() const { return shape_.heads * shape_.head_dim; }
  int64_t kv_width() const { return shape_.kv_heads * shape_.head_dim; }
  int64_t stride() const { return q_width() + 2 * kv_width(); }

  void put(const Values& q, const Values& k, const Values& v) {
    Values packed(static_cast<size_t>(shape_.rows() * stride()));
    const auto place = [&](const Values& from, int64_t width, int64_t offset) {
      for (int64_t r = 0; r < shape_.rows(); ++r) {
        for (int64_t c = 0; c < width; ++c) {
          packed[static_cast<size_t>(r * stride() + offset + c)] =
              from[static_cast<size_t>(r * width + c)];
        }
      }
    };
    place(q, q_width(), 0);
    place(k, kv_width(), q_width());
    place(v, kv_width(), q_width() + kv_width());
    qkv_ = device_.put(packed, dtype_);
    cu_seqlens_ = device_.put_raw(shape_.cu_seqlens);
    out_ = device_.poisoned(shape_.rows() * q_width(), dtype_);
    lse_ = static_cast<float*>(device_.poisoned(shape_.heads * shape_.rows(), DType::kF32));
  }

  AttentionArgs args(bool backward) {
    AttentionArgs args;
    args.q = qkv_;
    args.k = element(qkv_, q_width());
    args.v = element(qkv_, q_width() + kv_width());
    args.out = out_;
    args.lse = lse_;
    args.cu_seqlens = cu_seqlens_;
    args.cu_seqlens_host = shape_.cu_seqlens;
    args.rows = shape_.rows();
    args.heads = shape_.heads, args.kv_heads = shape_.kv_heads, args.head_dim = shape_.head_dim;
    args.q_stride = args.kv_stride = stride();
    args.scale = static_cast<float>(shape_.scale);
    args.dtype = dtype_;
    int64_t longest = 0;
    for (size_t s = 0; s + 1 < shape_.cu_seqlens.size(); ++s) {
      longest = std::max<int64_t>(longest, shape_.cu_seqlens[s + 1] - shape_.cu_seqlens[s]);
    }
    args.workspace_bytes = device_.ops().attention_workspace_bytes(
        {args.rows, args.heads, args.kv_heads, args.head_dim, longest, dtype_, backward});
    args.workspace = device_.poisoned_bytes(args.workspace_bytes);
    return args;
  }

  AttentionResult forward() {
    device_.ops().attention_forward(device_.queue(), args(false));
    return {device_.get(out_, shape_.rows() * q_width(), dtype_),
            device_.get(lse_, shape_.heads * shape_.rows(), DType::kF32)};
  }

  AttentionGradients backward(const Values& dout) {
    AttentionBackwardArgs backward;
    backward.forward = args(true);
    backward.dout = device_.put(dout, dtype_);
    const int64_t numel = shape_.rows() * stride();
    void* gradient = device_.poisoned(numel, dtype_);
    backward.dq = gradient;
    backward.dk = element(gradient, q_width());
    backward.dv = element(gradient, q_width() + kv_width());
    device_.ops().attention_backward(device_.queue(), backward);
    const Values all = device_.get(gradient, numel, dtype_);
    return {gather(all, shape_.rows(), q_width(), stride()),
            gather(all, shape_.rows(), kv_width(), stride(), q_width()),
            gather(all, shape_.rows(), kv_width(), stride(), q_width() + kv_width())};
  }

 private:
  void* element(void* base, int64_t index) const {
    return static_cast<std::byte*>(base) + index * static_cast<int64_t>(dtype_bytes(dtype_));
  }

  TestDevice& device_;
  const AttentionCase shape_;
  const DType dtype_;
  void* qkv_ = nullptr;
  void* out_ = nullptr;
  float* lse_ = nullptr;
  const int32_t* cu_seqlens_ = nullptr;
};

}  // namespace

TEST_P(OpsSuite, AttentionForwardAndBackward) {
  for (const auto& [name, shape] : attention_cases()) {
    SCOPED_TRACE(name);
    TestDevice fresh(GetParam().make());
    PackedAttention attention(fresh, shape, dtype());
    const Values q = random(shape.rows() * attention.q_width());
    const Values k = random(shape.rows() * attention.kv_width());
    const Values v = random(shape.rows() * attention.kv_width());
    const Values dout = random(shape.rows() * attention.q_width());
    attention.put(q, k, v);
    const AttentionResult result = attention.forward();
    const AttentionResult expected = reference_attention(shape, q, k, v);
    expect_close(result.out, expected.out, tolerance(), "out");
    // The scores of 16-bit inputs are exact in fp32 but for the scale.
    expect_close(result.lse, expected.lse, dtype() == DType::kF32 ? 1e-5 : 1e-2, "lse");
    const AttentionGradients gradients = attention.backward(dout);
    const auto truth = reference_attention_backward(shape, q, k, v, dout);
    // A query that sees only itself has a gradient of exactly zero, where only rounding is left: an
    // absolute bound relative to dout.
    const bool no_scores = shape.rows() + 1 == static_cast<int64_t>(shape.cu_seqlens.size());
    if (no_scores) {
      for (const double value : gradients.dq) EXPECT_NEAR(value, 0.0, 16 * tolerance());
      for (const double value : gradients.dk) EXPECT_NEAR(value, 0.0, 16 * tolerance());
    } else {
      expect_close(gradients.dq, truth.dq, tolerance(), "dq");
      expect_close(gradients.dk, truth.dk, tolerance(), "dk");
    }
    expect_close(gradients.dv, truth.dv, tolerance(), "dv");
  }
}

TEST_P(OpsSuite, AttentionGivesTheSameBitsAgain) {
  const AttentionCase shape{{0, 100, 260}, 6, 2, 64, 0.125};
  PackedAttention attention(device(), shape, dtype());
  attention.put(random(shape.rows() * attention.q_width()),
                random(shape.rows() * attention.kv_width()),
                random(shape.rows() * attention.kv_width()));
  const Values dout = random(shape.rows() * attention.q_width());
  const AttentionResult first = attention.forward();
  const AttentionGradients gradients = attention.backward(dout);
  for (int repeat = 0; repeat < 3; ++repeat) {
    EXPECT_EQ(attention.forward().out, first.out);
    const AttentionGradients again = attention.backward(dout);
    EXPECT_EQ(again.dq, gradients.dq);
    EXPECT_EQ(again.dk, gradients.dk);
    EXPECT_EQ(again.dv, gradients.dv);
  }
}

// Scores of +-100 overflow e^x in fp32 when the maximum is not taken out first.
TEST_P(OpsSuite, AttentionSurvivesLargeScores) {
  const AttentionCase shape{{0, 90}, 1, 1, 16, 1.0};
  PackedAttention attention(device(), shape, dtype());
  const Values q = random(90 * 16, 5.0), k = random(90 * 16, 5.0), v = random(90 * 16);
  attention.put(q, k, v);
  expect_close(attention.forward().out, reference_attention(shape, q, k, v).out,
               std::max(tolerance(), 1e-4), "out");
}

TEST_P(OpsSuite, AttentionRefusesASmallWorkspace) {
  const AttentionCase shape{{0, 10}, 2, 1, 16, 1.0};
  PackedAttention attention(device(), shape, dtype());
  attention.put(random(320), random(160), random(160));
  AttentionBackwardArgs backward;
  backward.forward = attention.args(true);
  if (backward.forward.workspace_bytes == 0) GTEST_SKIP() << "this backend needs no workspace";
  backward.forward.workspace_bytes -= 1;
  EXPECT_THROW(ops().attention_backward(queue(), backward), Error);
}

}  // namespace orlop::test
