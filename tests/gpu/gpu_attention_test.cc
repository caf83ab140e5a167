// Attention at the sizes of training: cuDNN's, in pieces and ragged, against the plain kernels,
// which the suite of tests/ops compares with fp64.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "device_data.h"
#include "gpu/kernels/kernels.h"

namespace orlop::test {
namespace {

auto* const environment =
    static_cast<GpuEnvironment*>(testing::AddGlobalTestEnvironment(new GpuEnvironment(6 * kGiB)));

struct AttentionShapeCase {
  std::string name;
  std::vector<int32_t> lengths;
  int64_t heads, kv_heads, head_dim;
};

std::vector<int32_t> repeated(int count, int32_t length) {
  return std::vector<int32_t>(static_cast<size_t>(count), length);
}

class GpuAttention : public testing::TestWithParam<AttentionShapeCase> {
 protected:
  void SetUp() override {
    SKIP_WITHOUT_GPU();
    const AttentionShapeCase& c = GetParam();
    int32_t longest = 0;
    offsets_ = {0};
    for (const int32_t length : c.lengths) {
      offsets_.push_back(offsets_.back() + length);
      longest = std::max(longest, length);
    }
    const int64_t rows = offsets_.back();
    stride_ = (c.heads + 2 * c.kv_heads) * c.head_dim;
    std::byte* qkv = data_.random_bf16(rows * stride_, 2.0f, 11);
    AttentionArgs& args = args_.forward;
    args.q = qkv;
    args.k = qkv + c.heads * c.head_dim * 2;
    args.v = qkv + (c.heads + c.kv_heads) * c.head_dim * 2;
    args.cu_seqlens = data_.put(offsets_);
    args.cu_seqlens_host = offsets_;
    args.rows = rows;
    args.heads = c.heads;
    args.kv_heads = c.kv_heads;
    args.head_dim = c.head_dim;
    args.q_stride = args.kv_stride = stride_;
    args.scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim));
    args.dtype = DType::kBF16;
    for (const bool backward : {false, true}) {
      args.workspace_bytes =
          std::max(args.workspace_bytes,
                   data_.ops().attention_workspace_bytes(
                       {rows, c.heads, c.kv_heads, c.head_dim, longest, DType::kBF16, backward}));
    }
    args.workspace = data_.poisoned(args.workspace_bytes);
    args_.dout = data_.random_bf16(rows * c.heads * c.head_dim, 1.0f, 12);
  }

  struct Result {
    std::vector<uint16_t> out, gradients;
    std::vector<float> lse;
  };

  // Runs both passes into fresh, poisoned memory; `guard` elements behind every result must stay.
  template <typename Forward, typename Backward>
  Result run(Forward&& forward, Backward&& backward) {
    constexpr size_t kGuard = 4096;
    AttentionArgs& args = args_.forward;
    const auto out_numel = static_cast<size_t>(args.rows * args.heads * args.head_dim);
    const auto gradient_numel = static_cast<size_t>(args.rows * stride_);
    const auto lse_numel = static_cast<size_t>(args.rows * args.heads);
    args.out = data_.poisoned(out_numel * 2 + kGuard);
    args.lse = reinterpret_cast<float*>(data_.poisoned(lse_numel * 4 + kGuard));
    std::byte* gradient = data_.poisoned(gradient_numel * 2 + kGuard);
    args_.dq = gradient;
    args_.dk = gradient + args.heads * args.head_dim * 2;
    args_.dv = gradient + (args.heads + args.kv_heads) * args.head_dim * 2;
    forward(args);
    backward(args_);
    const auto guard = [&](const void* p, size_t bytes) {
      EXPECT_EQ(data_.get<uint8_t>(static_cast<const std::byte*>(p) + bytes, kGuard),
                std::vector<uint8_t>(kGuard, 0xff))
          << "written behind the end";
    };
    guard(args.out, out_numel * 2);
    guard(args.lse, lse_numel * 4);
    guard(gradient, gradient_numel * 2);
    return {data_.get<uint16_t>(args.out, out_numel), data_.get<uint16_t>(gradient, gradient_numel),
            data_.get<float>(args.lse, lse_numel)};
  }
  Result run_ops() {
    return run([&](const auto& args) { data_.ops().attention_forward(data_.queue(), args); },
               [&](const auto& args) { data_.ops().attention_backward(data_.queue(), args); });
  }
  Result run_plain() {
    const cudaStream_t stream = gpu().backend()->cuda_queue(QueueKind::kCompute).stream();
    return run([&](const auto& args) { kernels::plain_attention_forward(args, stream); },
               [&](const auto& args) { kernels::plain_attention_backward(args, stream); });
  }

  std::vector<int32_t> offsets_;
  int64_t stride_ = 0;
  AttentionBackwardArgs args_;
  DeviceData data_;
};

double relative_error(const std::vector<uint16_t>& actual, const std::vector<uint16_t>& expected) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double a = bf16_to_float(actual[i]);
    const double e = bf16_to_float(expected[i]);
    error += (a - e) * (a - e);
    norm += e * e;
  }
  return std::sqrt(error / norm);
}

TEST_P(GpuAttention, AgreesWithThePlainKernelsAndRepeatsItsBits) {
  const Result first = run_ops();
  const Result plain = run_plain();
  const double out_error = relative_error(first.out, plain.out);
  const double gradient_error = relative_error(first.gradients, plain.gradients);
  double lse_error = 0;
  for (size_t i = 0; i < first.lse.size(); ++i) {
    lse_error = std::max(lse_error, std::abs(static_cast<double>(first.lse[i] - plain.lse[i])));
  }
  std::printf("%s: out %.2e, gradients %.2e, lse %.2e (largest), workspace %s\n",
              GetParam().name.c_str(), out_error, gradient_error, lse_error,
              format_bytes(args_.forward.workspace_bytes).c_str());
  // NaN fails every comparison.
  EXPECT_LT(out_error, 1e-2);
  EXPECT_LT(gradient_error, 1e-2);
  EXPECT_LT(lse_error, 1e-2);
  for (int repeat = 0; repeat < 2; ++repeat) {
    const Result again = run_ops();
    EXPECT_EQ(again.out, first.out);
    EXPECT_EQ(again.gradients, first.gradients) << "the backward pass is not deterministic";
    EXPECT_EQ(again.lse, first.lse);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, GpuAttention,
    testing::Values(AttentionShapeCase{"L3", repeated(3, 2048), 24, 8, 128},
                    AttentionShapeCase{"L7", repeated(2, 2048), 32, 32, 128},
                    AttentionShapeCase{"SmolLM", repeated(4, 512), 9, 3, 64},
                    AttentionShapeCase{"CutByHeads", {6144}, 16, 8, 128},
                    AttentionShapeCase{"OneOddSequence", {1000}, 8, 2, 128},
                    AttentionShapeCase{"Packed", {1, 700, 128, 3, 2048, 65, 129, 511}, 8, 2, 128},
                    AttentionShapeCase{"PackedHead64", {300, 7, 1100, 129}, 9, 3, 64},
                    AttentionShapeCase{"Head96", {256, 256}, 4, 4, 96},
                    AttentionShapeCase{"Head256", {384, 100}, 4, 2, 256}),
    [](const auto& info) { return info.param.name; });

}  // namespace

GpuEnvironment& gpu() { return *environment; }

}  // namespace orlop::test
