#include <cmath>
#include <limits>

#include "cpu_adam/adam.h"
#include "cpu_adam/grad_norm.h"
#include "ops_suite.h"

namespace orlop::test {
namespace {

struct RoundedGradient {
  Values values;
  double square_sum = 0;
  int64_t first_nonfinite = 0;
};

RoundedGradient run_round_grad(TestDevice& device, const Values& gradient, DType dtype) {
  const auto numel = static_cast<int64_t>(gradient.size());
  RoundGradArgs args;
  args.grad = device.put_f32(gradient);
  args.rounded = dtype == DType::kF32 ? nullptr : device.poisoned(numel, dtype);
  args.square_sum = static_cast<double*>(device.poisoned_bytes(sizeof(double)));
  args.first_nonfinite = static_cast<int64_t*>(device.poisoned_bytes(sizeof(int64_t)));
  args.scratch = device.poisoned_bytes(device.ops().grad_norm_scratch_bytes(numel));
  args.numel = numel;
  args.out_dtype = dtype;
  device.ops().round_grad(device.queue(), args);
  const void* result = args.rounded ? args.rounded : args.grad;
  return {device.get(result, numel, dtype), device.get_raw<double>(args.square_sum, 1)[0],
          device.get_raw<int64_t>(args.first_nonfinite, 1)[0]};
}

// The documented order of cpu_adam/grad_norm.h, written out once more.
double ordered_square_sum(const Values& gradient) {
  std::vector<double> sums;
  for (size_t begin = 0; begin < gradient.size(); begin += kNormChunk) {
    double lanes[kNormLanes] = {};
    for (size_t i = begin; i < std::min(begin + kNormChunk, gradient.size()); ++i) {
      lanes[i % kNormLanes] += gradient[i] * gradient[i];
    }
    for (int half = kNormLanes / 2; half > 0; half /= 2) {
      for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
    }
    sums.push_back(lanes[0]);
  }
  while (sums.size() > 1) {
    std::vector<double> next;
    for (size_t i = 0; i < sums.size(); i += 2) {
      next.push_back(i + 1 < sums.size() ? sums[i] + sums[i + 1] : sums[i]);
    }
    sums = next;
  }
  return sums.empty() ? 0.0 : sums[0];
}

StepScalars run_finish_norm(TestDevice& device, const std::vector<double>& sums,
                            const std::vector<int64_t>& nonfinite, float max_norm,
                            float loss_scale) {
  FinishNormArgs args;
  args.square_sums = device.put_raw(sums);
  args.first_nonfinite = device.put_raw(nonfinite);
  args.params = static_cast<int64_t>(sums.size());
  args.max_norm = max_norm;
  args.loss_scale = loss_scale;
  args.out = static_cast<StepScalars*>(device.poisoned_bytes(sizeof(StepScalars)));
  device.ops().finish_norm(device.queue(), args);
  return device.get_raw<StepScalars>(args.out, 1)[0];
}

}  // namespace

TEST_P(OpsSuite, RoundGradRoundsAndSumsInTheFixedOrder) {
  for (const int64_t numel : {1, 15, 4096, 4097, 70001}) {
    const Values gradient = random_values(random_, numel, DType::kF32);
    const RoundedGradient result = run_round_grad(device(), gradient, dtype());
    EXPECT_EQ(result.values, rounded(gradient, dtype()));
    EXPECT_EQ(result.square_sum, ordered_square_sum(result.values)) << numel << " elements";
    EXPECT_EQ(result.first_nonfinite, -1);
  }
}

TEST_P(OpsSuite, RoundGradFindsTheFirstNonFiniteElement) {
  Values gradient = random_values(random_, 10000, DType::kF32);
  gradient[9000] = std::numeric_limits<double>::quiet_NaN();
  gradient[4099] = -std::numeric_limits<double>::infinity();
  EXPECT_EQ(run_round_grad(device(), gradient, dtype()).first_nonfinite, 4099);
  gradient[17] = 1e38;  // finite in fp32 and bf16, overflows in fp16
  const int64_t first = run_round_grad(device(), gradient, dtype()).first_nonfinite;
  EXPECT_EQ(first, dtype() == DType::kF16 ? 17 : 4099);
}

TEST_P(OpsSuite, NarrowRoundsEveryElementOnce) {
  for (const int64_t numel : {0, 1, 7, 8, 9, 4093, 70001}) {
    const Values values = random_values(random_, numel, DType::kF32);
    void* to = device().poisoned(numel, dtype());
    ops().narrow(queue(), device().put_f32(values), to, numel, dtype());
    EXPECT_EQ(device().get(to, numel, dtype()), rounded(values, dtype())) << numel << " elements";
  }
}

// Tiny and huge elements beside each other, so that the sum depends on the order.
TEST_P(OpsSuite, SumRowsAddsFromTheFirstRowOn) {
  for (const int64_t rows : {1, 2, 3, 8}) {
    for (const int64_t numel : {0, 1, 7, 8, 9, 4096, 4097, 70001}) {
      Values from;
      for (int64_t row = 0; row < rows; ++row) {
        const Values values = random(numel, std::pow(10.0, static_cast<double>(row % 3)));
        from.insert(from.end(), values.begin(), values.end());
      }
      Values expected;
      for (int64_t i = 0; i < numel; ++i) {
        float sum = static_cast<float>(from[static_cast<size_t>(i)]);
        for (int64_t row = 1; row < rows; ++row) {
          sum += static_cast<float>(from[static_cast<size_t>(row * numel + i)]);
        }
        expected.push_back(static_cast<double>(sum));
      }
      auto* to = static_cast<float*>(device().poisoned(numel, DType::kF32));
      ops().sum_rows(queue(), device().put(from, dtype()), to, rows, numel, dtype());
      EXPECT_EQ(device().get(to, numel, DType::kF32), expected)
          << rows << " rows of " << numel << " elements";
    }
  }
}

TEST_P(OpsSuite, FinishNormClipsAndUnscales) {
  const std::vector<double> sums = {9.0, 16.0, 0.0};
  const std::vector<int64_t> finite = {-1, -1, -1};
  const StepScalars clipped = run_finish_norm(device(), sums, finite, 1.0f, 2.0f);
  EXPECT_DOUBLE_EQ(clipped.grad_norm, 2.5);
  EXPECT_EQ(clipped.grad_scale, static_cast<float>(1.0 / (2.5 + 1e-6) / 2.0));
  EXPECT_EQ(clipped.skip, 0);
  EXPECT_EQ(clipped.nonfinite_param, -1);
  EXPECT_EQ(run_finish_norm(device(), sums, finite, 100.0f, 2.0f).grad_scale, 0.5f);
  EXPECT_EQ(run_finish_norm(device(), sums, finite, 0.0f, 1.0f).grad_scale, 1.0f);
}

TEST_P(OpsSuite, FinishNormSkipsAndNamesTheFirstNonFiniteParameter) {
  const StepScalars scalars = run_finish_norm(device(), {1.0, 2.0, 3.0}, {-1, 5, 0}, 1.0f, 1.0f);
  EXPECT_EQ(scalars.skip, 1);
  EXPECT_EQ(scalars.nonfinite_param, 1);
  EXPECT_EQ(scalars.nonfinite_index, 5);
}

// Of every parameter the parts of all ranks, in the order of the ranks.
TEST_P(OpsSuite, FinishNormSumsParameterByParameterAndRankByRank) {
  constexpr int64_t kRanks = 3, kParams = 2, kStride = 5;
  std::vector<double> sums(kRanks * kStride, 1e300);  // between the rows: not to be read
  std::vector<int64_t> nonfinite(kRanks * kStride, 0);
  double want = 0;
  for (int64_t param = 0; param < kParams; ++param) {
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      const size_t at = static_cast<size_t>(rank * kStride + param);
      sums[at] = std::pow(1.7, static_cast<double>(37 * param - 11 * rank)) / 3;
      nonfinite[at] = -1;
      want += sums[at];
    }
  }
  FinishNormArgs args;
  args.square_sums = device().put_raw(sums);
  args.params = kParams;
  args.ranks = kRanks;
  args.rank_stride = kStride;
  args.out = static_cast<StepScalars*>(device().poisoned_bytes(sizeof(StepScalars)));
  const auto finish = [&] {
    args.first_nonfinite = device().put_raw(nonfinite);
    device().ops().finish_norm(device().queue(), args);
    return device().get_raw<StepScalars>(args.out, 1)[0];
  };
  const StepScalars finite = finish();
  EXPECT_EQ(finite.grad_norm, std::sqrt(want));
  EXPECT_EQ(finite.skip, 0);
  EXPECT_EQ(finite.nonfinite_rank, -1);
  nonfinite[2 * kStride + 0] = 7;
  nonfinite[1 * kStride + 1] = 3;
  const StepScalars bad = finish();
  EXPECT_EQ(bad.skip, 1);
  EXPECT_EQ(bad.nonfinite_param, 0);
  EXPECT_EQ(bad.nonfinite_rank, 2);
  EXPECT_EQ(bad.nonfinite_index, 7);
}

// The device's step gives the bits of cpu_adam, and leaves everything alone when the step is
// skipped.
TEST_P(OpsSuite, DeviceAdamEqualsCpuAdamBitForBit) {
  for (const DType moment_dtype : {DType::kF32, DType::kBF16}) {
    const int64_t numel = 10007;
    TestDevice& d = device();
    const auto bytes_of = [&](DType type) {
      return static_cast<size_t>(numel) * dtype_bytes(type);
    };
    const auto fill = [&](DType type, bool positive) {
      const Values values = random_values(random_, numel, type, 0.1);
      std::vector<uint8_t> bytes(bytes_of(type));
      Values chosen = values;
      if (positive) {
        for (double& v : chosen) v = std::abs(v);
      }
      const auto raw = d.get_raw<uint8_t>(d.put(chosen, type), static_cast<int64_t>(bytes.size()));
      return raw;
    };
    const bool split = dtype() == DType::kBF16, has_copy = dtype() != DType::kF32;
    auto param = fill(has_copy ? dtype() : DType::kBF16, false);
    auto lo = fill(DType::kBF16, false);
    auto master = fill(DType::kF32, false);
    auto exp_avg = fill(moment_dtype, false), exp_avg_sq = fill(moment_dtype, true);
    const auto grad = fill(dtype(), false);

    AdamShard shard;
    shard.compute_dtype = shard.grad_dtype = dtype();
    shard.moment_dtype = moment_dtype;
    shard.numel = numel, shard.rng_offset = 12345;
    const AdamHyper hyper = {1e-3, 0.9, 0.95, 1e-8, 0.1, true, false, 3, 99};
    DeviceAdamArgs args{shard, hyper};
    args.shard.param = has_copy ? d.put_raw(param) : nullptr;
    args.shard.lo = split ? reinterpret_cast<uint16_t*>(d.put_raw(lo)) : nullptr;
    args.shard.master = split ? nullptr : reinterpret_cast<float*>(d.put_raw(master));
    args.shard.exp_avg = d.put_raw(exp_avg);
    args.shard.exp_avg_sq = d.put_raw(exp_avg_sq);
    args.shard.grad = d.put_raw(grad);

    StepScalars scalars;
    scalars.grad_scale = 0.7f;
    scalars.skip = 1;
    args.scalars = d.put_raw(std::vector<StepScalars>{scalars});
    d.ops().device_adam(d.queue(), args);
    EXPECT_EQ(d.get_raw<uint8_t>(args.shard.exp_avg, static_cast<int64_t>(exp_avg.size())),
              exp_avg);
    scalars.skip = 0;
    args.scalars = d.put_raw(std::vector<StepScalars>{scalars});
    d.ops().device_adam(d.queue(), args);

    shard.param = has_copy ? param.data() : nullptr;
    shard.lo = split ? reinterpret_cast<uint16_t*>(lo.data()) : nullptr;
    shard.master = split ? nullptr : reinterpret_cast<float*>(master.data());
    shard.exp_avg = exp_avg.data(), shard.exp_avg_sq = exp_avg_sq.data();
    shard.grad = grad.data();
    adam_step(shard, hyper, 0.7f, 1);
    const auto expect_bytes = [&](const void* on_device, const std::vector<uint8_t>& expected) {
      EXPECT_EQ(d.get_raw<uint8_t>(on_device, static_cast<int64_t>(expected.size())), expected);
    };
    expect_bytes(args.shard.exp_avg, exp_avg);
    expect_bytes(args.shard.exp_avg_sq, exp_avg_sq);
    if (has_copy) expect_bytes(args.shard.param, param);
    if (split) expect_bytes(args.shard.lo, lo);
    if (!split) expect_bytes(args.shard.master, master);
  }
}

}  // namespace orlop::test
