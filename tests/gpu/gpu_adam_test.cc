// The update on the GPU equals cpu_adam bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "bits.h"
#include "cpu_adam/adam.h"

namespace orlop::test {
namespace {

auto* const environment =
    static_cast<GpuEnvironment*>(testing::AddGlobalTestEnvironment(new GpuEnvironment(24 * kGiB)));

// Payloads of NaN are outside the promise: all become one.
Bytes canonical(Bytes in, DType dtype) {
  const auto visit = [&in]<typename Bits>(Bits infinity, Bits magnitude, Bits nan) {
    for (size_t i = 0; i + sizeof(Bits) <= in.size(); i += sizeof(Bits)) {
      Bits bits;
      std::memcpy(&bits, in.data() + i, sizeof(Bits));
      if (static_cast<Bits>(bits & magnitude) > infinity) {
        std::memcpy(in.data() + i, &nan, sizeof(Bits));
      }
    }
  };
  if (dtype == DType::kF32) visit(uint32_t{0x7f800000}, uint32_t{0x7fffffff}, uint32_t{0x7fc00000});
  if (dtype == DType::kBF16) visit(uint16_t{0x7f80}, uint16_t{0x7fff}, uint16_t{0x7fc0});
  if (dtype == DType::kF16) visit(uint16_t{0x7c00}, uint16_t{0x7fff}, uint16_t{0x7e00});
  return in;
}

void expect_equal(const Bytes& gpu_bytes, const Bytes& cpu_bytes, DType dtype, const char* plane) {
  const Bytes a = canonical(gpu_bytes, dtype);
  const Bytes b = canonical(cpu_bytes, dtype);
  ASSERT_EQ(a.size(), b.size());
  if (a == b) return;
  const size_t at =
      static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin()).first - a.begin());
  const size_t element = at / dtype_bytes(dtype);
  uint32_t bits[2] = {};
  std::memcpy(&bits[0], a.data() + element * dtype_bytes(dtype), dtype_bytes(dtype));
  std::memcpy(&bits[1], b.data() + element * dtype_bytes(dtype), dtype_bytes(dtype));
  FAIL() << plane << "[" << element << "]: GPU " << std::hex << bits[0] << ", CPU " << bits[1];
}

// The states of one shard in host memory.
struct Shard {
  DType compute, moment;
  Bytes param, lo, master, exp_avg, exp_avg_sq, grad;

  Shard(std::mt19937_64& random, DType compute, DType moment, int64_t numel, bool special)
      : compute(compute), moment(moment) {
    const auto p = values(random, numel, 0.1f, special);
    auto v = values(random, numel, 1e-3f, special);
    for (float& value : v) value = std::abs(value);
    if (compute == DType::kBF16) {
      lo.resize(static_cast<size_t>(numel) * 2);
      for (std::byte& byte : lo) byte = static_cast<std::byte>(random());
      param = encode(p, DType::kBF16);
    } else {
      master = encode(p, DType::kF32);
      if (compute == DType::kF16) param = encode(p, DType::kF16);
    }
    exp_avg = encode(values(random, numel, 1e-2f, special), moment);
    exp_avg_sq = encode(v, moment);
    grad = encode(values(random, numel, 0.5f, special), compute);
  }

  AdamShard view(int64_t numel, int64_t rng_offset) {
    const auto data = [](Bytes& bytes) { return bytes.empty() ? nullptr : bytes.data(); };
    return {.compute_dtype = compute,
            .moment_dtype = moment,
            .grad_dtype = compute,
            .param = data(param),
            .lo = reinterpret_cast<uint16_t*>(data(lo)),
            .master = reinterpret_cast<float*>(data(master)),
            .exp_avg = data(exp_avg),
            .exp_avg_sq = data(exp_avg_sq),
            .grad = data(grad),
            .numel = numel,
            .rng_offset = rng_offset};
  }
};

struct AdamCase {
  DType compute, moment;
};

class GpuAdam : public GpuBits, public testing::WithParamInterface<AdamCase> {
 protected:
  // Planes begin `shift` elements behind an aligned address.
  DeviceAdamArgs upload(const Shard& shard, size_t shift) {
    const auto plane = [&](const Bytes& bytes, DType dtype) -> void* {
      if (bytes.empty()) return nullptr;
      return data_.put_bytes(bytes.data(), bytes.size(), shift * dtype_bytes(dtype));
    };
    DeviceAdamArgs args;
    args.shard.compute_dtype = args.shard.grad_dtype = shard.compute;
    args.shard.moment_dtype = shard.moment;
    args.shard.param = plane(shard.param, shard.compute);
    args.shard.lo = static_cast<uint16_t*>(plane(shard.lo, DType::kBF16));
    args.shard.master = static_cast<float*>(plane(shard.master, DType::kF32));
    args.shard.exp_avg = plane(shard.exp_avg, shard.moment);
    args.shard.exp_avg_sq = plane(shard.exp_avg_sq, shard.moment);
    args.shard.grad = plane(shard.grad, shard.compute);
    return args;
  }
  StepScalars* put_scalars(float grad_scale, bool skip) {
    StepScalars scalars;
    scalars.grad_scale = grad_scale;
    scalars.skip = skip ? 1 : 0;
    return reinterpret_cast<StepScalars*>(data_.put_bytes(&scalars, sizeof(scalars)));
  }
  void expect_shard(const DeviceAdamArgs& args, const Shard& cpu) {
    expect_equal(get_bytes(args.shard.exp_avg, cpu.exp_avg.size()), cpu.exp_avg, cpu.moment,
                 "exp_avg");
    expect_equal(get_bytes(args.shard.exp_avg_sq, cpu.exp_avg_sq.size()), cpu.exp_avg_sq,
                 cpu.moment, "exp_avg_sq");
    if (!cpu.param.empty()) {
      expect_equal(get_bytes(args.shard.param, cpu.param.size()), cpu.param, cpu.compute, "param");
    }
    if (!cpu.lo.empty()) {
      EXPECT_EQ(get_bytes(args.shard.lo, cpu.lo.size()), cpu.lo) << "lo";
    }
    if (!cpu.master.empty()) {
      expect_equal(get_bytes(args.shard.master, cpu.master.size()), cpu.master, DType::kF32,
                   "master");
    }
  }
};

AdamHyper make_hyper(int64_t step, bool decoupled) {
  return {.lr = 3e-4,
          .beta1 = 0.9,
          .beta2 = 0.95,
          .eps = 1e-8,
          .weight_decay = 0.1,
          .decoupled = decoupled,
          .step = step,
          .seed = 1234567890123u};
}

TEST_P(GpuAdam, EqualsCpuAdamOverSizesStepsAndAlignments) {
  const auto [compute, moment] = GetParam();
  for (const bool decoupled : {true, false}) {
    for (const size_t shift : {size_t{0}, size_t{1}}) {
      for (const int64_t numel : {1, 7, 8, 9, 4099, 1000003}) {
        SCOPED_TRACE(testing::Message() << numel << " elements, shift " << shift);
        data_.reset();
        Shard cpu(random_, compute, moment, numel, false);
        DeviceAdamArgs args = upload(cpu, shift);
        args.shard.numel = numel;
        args.shard.rng_offset = 77;
        args.scalars = put_scalars(0.37f, false);
        for (int64_t step = 1; step <= 3; ++step) {
          const AdamHyper hyper = make_hyper(step, decoupled);
          args.hyper = hyper;
          data_.ops().device_adam(data_.queue(), args);
          adam_step(cpu.view(numel, 77), hyper, 0.37f, 2);
        }
        expect_shard(args, cpu);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(GpuAdam, EqualsCpuAdamOnInfinitiesAndNan) {
  const auto [compute, moment] = GetParam();
  constexpr int64_t kNumel = 50021;
  Shard cpu(random_, compute, moment, kNumel, true);
  DeviceAdamArgs args = upload(cpu, 0);
  args.shard.numel = kNumel;
  args.scalars = put_scalars(1.0f, false);
  const AdamHyper hyper = make_hyper(2, true);
  args.hyper = hyper;
  data_.ops().device_adam(data_.queue(), args);
  adam_step(cpu.view(kNumel, 0), hyper, 1.0f, 2);
  expect_shard(args, cpu);
}

// The generator's key changes at multiples of 2^32.
TEST_P(GpuAdam, EqualsCpuAdamAcrossTheUpperHalfOfTheIndex) {
  const auto [compute, moment] = GetParam();
  constexpr int64_t kNumel = 10007;
  const int64_t offset = (int64_t{3} << 32) - 5003;
  Shard cpu(random_, compute, moment, kNumel, false);
  DeviceAdamArgs args = upload(cpu, 0);
  args.shard.numel = kNumel;
  args.shard.rng_offset = offset;
  args.scalars = put_scalars(1.0f, false);
  const AdamHyper hyper = make_hyper(5, true);
  args.hyper = hyper;
  data_.ops().device_adam(data_.queue(), args);
  adam_step(cpu.view(kNumel, offset), hyper, 1.0f, 1);
  expect_shard(args, cpu);
}

TEST_P(GpuAdam, ASkippedStepChangesNoBit) {
  const auto [compute, moment] = GetParam();
  constexpr int64_t kNumel = 5003;
  Shard cpu(random_, compute, moment, kNumel, true);
  DeviceAdamArgs args = upload(cpu, 0);
  args.shard.numel = kNumel;
  args.scalars = put_scalars(std::numeric_limits<float>::quiet_NaN(), true);
  args.hyper = make_hyper(1, true);
  data_.ops().device_adam(data_.queue(), args);
  EXPECT_EQ(get_bytes(args.shard.exp_avg, cpu.exp_avg.size()), cpu.exp_avg);
  EXPECT_EQ(get_bytes(args.shard.exp_avg_sq, cpu.exp_avg_sq.size()), cpu.exp_avg_sq);
  if (!cpu.param.empty()) {
    EXPECT_EQ(get_bytes(args.shard.param, cpu.param.size()), cpu.param);
  }
  if (!cpu.lo.empty()) {
    EXPECT_EQ(get_bytes(args.shard.lo, cpu.lo.size()), cpu.lo);
  }
  if (!cpu.master.empty()) {
    EXPECT_EQ(get_bytes(args.shard.master, cpu.master.size()), cpu.master);
  }
}

std::string adam_case_name(const testing::TestParamInfo<AdamCase>& info) {
  return std::string(dtype_name(info.param.compute)) + "_" +
         std::string(dtype_name(info.param.moment));
}
INSTANTIATE_TEST_SUITE_P(
    Dtypes, GpuAdam,
    testing::Values(AdamCase{DType::kBF16, DType::kF32}, AdamCase{DType::kBF16, DType::kBF16},
                    AdamCase{DType::kF16, DType::kF32}, AdamCase{DType::kF16, DType::kBF16},
                    AdamCase{DType::kF32, DType::kF32}, AdamCase{DType::kF32, DType::kBF16}),
    adam_case_name);

// 2^31 elements and a ragged rest: windows are compared with the CPU's update of the same elements.
TEST_F(GpuBits, AdamOfMoreThan2To31ElementsEqualsTheCpuEverywhere) {
  constexpr int64_t kNumel = (int64_t{1} << 31) + 100003;
  Shard period(random_, DType::kBF16, DType::kBF16, kPeriod, false);
  DeviceAdamArgs args;
  const auto plane = [&](const Bytes& bytes) {
    return data_.repeated(bytes, static_cast<size_t>(kNumel) * 2);
  };
  args.shard.moment_dtype = DType::kBF16;
  args.shard.param = plane(period.param);
  args.shard.lo = reinterpret_cast<uint16_t*>(plane(period.lo));
  args.shard.exp_avg = plane(period.exp_avg);
  args.shard.exp_avg_sq = plane(period.exp_avg_sq);
  args.shard.grad = plane(period.grad);
  StepScalars scalars;
  scalars.grad_scale = 0.5f;
  args.scalars = reinterpret_cast<StepScalars*>(data_.put_bytes(&scalars, sizeof(scalars)));
  args.shard.numel = kNumel;
  const AdamHyper hyper = make_hyper(4, true);
  args.hyper = hyper;
  data_.ops().device_adam(data_.queue(), args);

  constexpr int64_t kWindow = 8192;
  for (const int64_t begin :
       {int64_t{0}, int64_t{123456789}, (int64_t{1} << 31) - kWindow / 2, kNumel - kWindow}) {
    SCOPED_TRACE(testing::Message() << "window at " << begin);
    const auto window = [&](const Bytes& bytes) {
      Bytes out(static_cast<size_t>(kWindow) * 2);
      for (int64_t i = 0; i < kWindow; ++i) {
        std::memcpy(out.data() + 2 * i, bytes.data() + 2 * ((begin + i) % kPeriod), 2);
      }
      return out;
    };
    Shard cpu = period;
    cpu.param = window(period.param);
    cpu.lo = window(period.lo);
    cpu.exp_avg = window(period.exp_avg);
    cpu.exp_avg_sq = window(period.exp_avg_sq);
    cpu.grad = window(period.grad);
    adam_step(cpu.view(kWindow, begin), hyper, 0.5f, 1);
    const auto at = [&](const void* plane) {
      return get_bytes(static_cast<const std::byte*>(plane) + 2 * begin, kWindow * 2);
    };
    EXPECT_EQ(at(args.shard.param), cpu.param);
    EXPECT_EQ(at(args.shard.lo), cpu.lo);
    EXPECT_EQ(at(args.shard.exp_avg), cpu.exp_avg);
    EXPECT_EQ(at(args.shard.exp_avg_sq), cpu.exp_avg_sq);
  }
}

}  // namespace

GpuEnvironment& gpu() { return *environment; }

}  // namespace orlop::test
