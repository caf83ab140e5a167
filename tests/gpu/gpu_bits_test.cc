// What must be equal bit for bit between the GPU and cpu_adam: the update and the norm. And what
// must be equal between a tensor of more than 2^31 elements and its parts.
#include <gmock/gmock.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/bytes.h"
#include "base/half.h"
#include "cpu_adam/adam.h"
#include "cpu_adam/grad_norm.h"
#include "gpu_environment.h"

namespace orlop::test {
namespace {

auto* const environment =
    static_cast<GpuEnvironment*>(testing::AddGlobalTestEnvironment(new GpuEnvironment(24 * kGiB)));

using Bytes = std::vector<std::byte>;

class GpuBits : public testing::Test {
 protected:
  void SetUp() override {
    SKIP_WITHOUT_GPU();
    used_ = 0;
  }

  Ops& ops() { return gpu().backend()->ops(); }
  Queue& queue() { return gpu().backend()->queue(QueueKind::kCompute); }

  std::byte* take(size_t bytes) {
    std::byte* out = gpu().arena() + used_;
    used_ = align_up(used_ + bytes, kDeviceAlignment);
    if (used_ > gpu().arena_bytes()) throw std::length_error("the test's arena is too small");
    return out;
  }
  std::byte* put(const void* host, size_t bytes, size_t offset = 0) {
    std::byte* out = take(bytes + offset) + offset;
    queue().upload(out, host, bytes);
    queue().synchronize();
    return out;
  }
  template <typename T>
  T* put(const std::vector<T>& host) {
    return reinterpret_cast<T*>(put(host.data(), host.size() * sizeof(T)));
  }
  Bytes get(const void* device, size_t bytes) {
    Bytes out(bytes);
    queue().offload(out.data(), device, bytes);
    queue().synchronize();
    return out;
  }
  template <typename T>
  T get_one(const T* device) {
    T out;
    queue().offload(&out, device, sizeof(T));
    queue().synchronize();
    return out;
  }
  // Repeats the first `period` bytes up to `bytes`.
  void repeat(std::byte* device, size_t period, size_t bytes) {
    for (size_t done = period; done < bytes;) {
      const size_t part = std::min(done, bytes - done);
      queue().copy_on_device(device + done, device, part);
      done += part;
    }
  }

  std::mt19937_64 random_{20240607};
  size_t used_ = 0;
};

// Ordinary values, zeros of both signs, subnormals and, with `special`, infinities and NaN.
std::vector<float> values(std::mt19937_64& random, int64_t numel, float deviation, bool special) {
  std::normal_distribution<float> normal(0.0f, deviation);
  std::vector<float> out(static_cast<size_t>(numel));
  for (float& value : out) {
    value = normal(random);
    const uint64_t dice = random() % 64;
    if (dice == 0) value = 0.0f;
    if (dice == 1) value = -0.0f;
    if (dice == 2) value *= 0x1p-130f;
    if (special && dice == 3) value = std::numeric_limits<float>::quiet_NaN();
    if (special && dice == 4) value = -std::numeric_limits<float>::infinity();
  }
  return out;
}

Bytes encode(const std::vector<float>& in, DType dtype) {
  Bytes out(in.size() * dtype_bytes(dtype));
  for (size_t i = 0; i < in.size(); ++i) {
    if (dtype == DType::kF32) {
      std::memcpy(out.data() + 4 * i, &in[i], 4);
    } else {
      const uint16_t bits = dtype == DType::kBF16 ? float_to_bf16(in[i]) : float_to_fp16(in[i]);
      std::memcpy(out.data() + 2 * i, &bits, 2);
    }
  }
  return out;
}

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
      return put(bytes.data(), bytes.size(), shift * dtype_bytes(dtype));
    };
    DeviceAdamArgs args;
    args.compute_dtype = shard.compute;
    args.moment_dtype = shard.moment;
    args.param = plane(shard.param, shard.compute);
    args.lo = static_cast<uint16_t*>(plane(shard.lo, DType::kBF16));
    args.master = static_cast<float*>(plane(shard.master, DType::kF32));
    args.exp_avg = plane(shard.exp_avg, shard.moment);
    args.exp_avg_sq = plane(shard.exp_avg_sq, shard.moment);
    args.grad = plane(shard.grad, shard.compute);
    return args;
  }
  StepScalars* put_scalars(float grad_scale, bool skip) {
    StepScalars scalars;
    scalars.grad_scale = grad_scale;
    scalars.skip = skip ? 1 : 0;
    return reinterpret_cast<StepScalars*>(put(&scalars, sizeof(scalars)));
  }
  void expect_shard(const DeviceAdamArgs& args, const Shard& cpu) {
    expect_equal(get(args.exp_avg, cpu.exp_avg.size()), cpu.exp_avg, cpu.moment, "exp_avg");
    expect_equal(get(args.exp_avg_sq, cpu.exp_avg_sq.size()), cpu.exp_avg_sq, cpu.moment,
                 "exp_avg_sq");
    if (!cpu.param.empty()) {
      expect_equal(get(args.param, cpu.param.size()), cpu.param, cpu.compute, "param");
    }
    if (!cpu.lo.empty()) {
      EXPECT_EQ(get(args.lo, cpu.lo.size()), cpu.lo) << "lo";
    }
    if (!cpu.master.empty()) {
      expect_equal(get(args.master, cpu.master.size()), cpu.master, DType::kF32, "master");
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

void set_hyper(DeviceAdamArgs& args, const AdamHyper& hyper) {
  args.lr = hyper.lr;
  args.beta1 = hyper.beta1;
  args.beta2 = hyper.beta2;
  args.eps = hyper.eps;
  args.weight_decay = hyper.weight_decay;
  args.decoupled = hyper.decoupled;
  args.step = hyper.step;
  args.seed = hyper.seed;
}

TEST_P(GpuAdam, EqualsCpuAdamOverSizesStepsAndAlignments) {
  const auto [compute, moment] = GetParam();
  for (const bool decoupled : {true, false}) {
    for (const size_t shift : {size_t{0}, size_t{1}}) {
      for (const int64_t numel : {1, 7, 8, 9, 4099, 1000003}) {
        SCOPED_TRACE(testing::Message() << numel << " elements, shift " << shift);
        used_ = 0;
        Shard cpu(random_, compute, moment, numel, false);
        DeviceAdamArgs args = upload(cpu, shift);
        args.numel = numel;
        args.rng_offset = 77;
        args.scalars = put_scalars(0.37f, false);
        for (int64_t step = 1; step <= 3; ++step) {
          const AdamHyper hyper = make_hyper(step, decoupled);
          set_hyper(args, hyper);
          ops().device_adam(queue(), args);
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
  args.numel = kNumel;
  args.scalars = put_scalars(1.0f, false);
  const AdamHyper hyper = make_hyper(2, true);
  set_hyper(args, hyper);
  ops().device_adam(queue(), args);
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
  args.numel = kNumel;
  args.rng_offset = offset;
  args.scalars = put_scalars(1.0f, false);
  const AdamHyper hyper = make_hyper(5, true);
  set_hyper(args, hyper);
  ops().device_adam(queue(), args);
  adam_step(cpu.view(kNumel, offset), hyper, 1.0f, 1);
  expect_shard(args, cpu);
}

TEST_P(GpuAdam, ASkippedStepChangesNoBit) {
  const auto [compute, moment] = GetParam();
  constexpr int64_t kNumel = 5003;
  Shard cpu(random_, compute, moment, kNumel, true);
  DeviceAdamArgs args = upload(cpu, 0);
  args.numel = kNumel;
  args.scalars = put_scalars(std::numeric_limits<float>::quiet_NaN(), true);
  set_hyper(args, make_hyper(1, true));
  ops().device_adam(queue(), args);
  EXPECT_EQ(get(args.exp_avg, cpu.exp_avg.size()), cpu.exp_avg);
  EXPECT_EQ(get(args.exp_avg_sq, cpu.exp_avg_sq.size()), cpu.exp_avg_sq);
  if (!cpu.param.empty()) {
    EXPECT_EQ(get(args.param, cpu.param.size()), cpu.param);
  }
  if (!cpu.lo.empty()) {
    EXPECT_EQ(get(args.lo, cpu.lo.size()), cpu.lo);
  }
  if (!cpu.master.empty()) {
    EXPECT_EQ(get(args.master, cpu.master.size()), cpu.master);
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

// Every plane repeats with this period, so that any window's contents are known.
constexpr int64_t kPeriod = int64_t{1} << 20;

// 2^31 elements and a ragged rest: windows are compared with the CPU's update of the same elements.
TEST_F(GpuBits, AdamOfMoreThan2To31ElementsEqualsTheCpuEverywhere) {
  constexpr int64_t kNumel = (int64_t{1} << 31) + 100003;
  Shard period(random_, DType::kBF16, DType::kBF16, kPeriod, false);
  DeviceAdamArgs args;
  const auto plane = [&](const Bytes& bytes) {
    std::byte* device = take(static_cast<size_t>(kNumel) * 2);
    queue().upload(device, bytes.data(), bytes.size());
    repeat(device, bytes.size(), static_cast<size_t>(kNumel) * 2);
    return device;
  };
  args.moment_dtype = DType::kBF16;
  args.param = plane(period.param);
  args.lo = reinterpret_cast<uint16_t*>(plane(period.lo));
  args.exp_avg = plane(period.exp_avg);
  args.exp_avg_sq = plane(period.exp_avg_sq);
  args.grad = plane(period.grad);
  StepScalars scalars;
  scalars.grad_scale = 0.5f;
  args.scalars = reinterpret_cast<StepScalars*>(put(&scalars, sizeof(scalars)));
  args.numel = kNumel;
  const AdamHyper hyper = make_hyper(4, true);
  set_hyper(args, hyper);
  ops().device_adam(queue(), args);

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
      return get(static_cast<const std::byte*>(plane) + 2 * begin, kWindow * 2);
    };
    EXPECT_EQ(at(args.param), cpu.param);
    EXPECT_EQ(at(args.lo), cpu.lo);
    EXPECT_EQ(at(args.exp_avg), cpu.exp_avg);
    EXPECT_EQ(at(args.exp_avg_sq), cpu.exp_avg_sq);
  }
}

struct Rounded {
  Bytes values;
  double square_sum;
  int64_t first_nonfinite;
};

class GpuNorm : public GpuBits, public testing::WithParamInterface<DType> {
 protected:
  Rounded round(const std::vector<float>& gradient) {
    const auto numel = static_cast<int64_t>(gradient.size());
    const DType dtype = GetParam();
    RoundGradArgs args;
    args.grad = put(gradient);
    args.rounded = take(gradient.size() * dtype_bytes(dtype));
    args.square_sum = reinterpret_cast<double*>(take(sizeof(double)));
    args.first_nonfinite = reinterpret_cast<int64_t*>(take(sizeof(int64_t)));
    args.scratch = take(ops().grad_norm_scratch_bytes(numel));
    args.numel = numel;
    args.out_dtype = dtype;
    ops().round_grad(queue(), args);
    return {get(args.rounded, gradient.size() * dtype_bytes(dtype)), get_one(args.square_sum),
            get_one(args.first_nonfinite)};
  }
};

TEST_P(GpuNorm, EqualsTheCpuBitForBit) {
  const DType dtype = GetParam();
  for (const int64_t numel :
       {0, 1, 15, 16, 17, 4095, 4096, 4097, 65535, 65536, 65537, 200003, 1048576, 5000011}) {
    SCOPED_TRACE(numel);
    used_ = 0;
    const std::vector<float> gradient = values(random_, numel, 0.02f, false);
    const Rounded result = round(gradient);
    const Bytes expected = encode(gradient, dtype);
    EXPECT_EQ(result.values, expected);
    std::vector<double> scratch(static_cast<size_t>(ceil_div(numel, kNormChunk)) + 1);
    const SquareSum cpu = grad_square_sum(expected.data(), dtype, numel, scratch.data(), 2);
    EXPECT_EQ(std::bit_cast<uint64_t>(result.square_sum), std::bit_cast<uint64_t>(cpu.sum));
    EXPECT_EQ(result.first_nonfinite, -1);
  }
}

TEST_P(GpuNorm, FindsTheFirstNonFiniteElement) {
  std::vector<float> gradient = values(random_, 300007, 0.02f, false);
  for (const int64_t at : {299999, 140000, 65536, 4096, 17, 0}) {
    used_ = 0;
    gradient[static_cast<size_t>(at)] = at % 2 == 0 ? std::numeric_limits<float>::infinity()
                                                    : std::numeric_limits<float>::quiet_NaN();
    const Rounded result = round(gradient);
    EXPECT_EQ(result.first_nonfinite, at);
    EXPECT_FALSE(std::isfinite(result.square_sum));
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, GpuNorm, testing::Values(DType::kF32, DType::kBF16, DType::kF16),
                         [](const auto& info) { return std::string(dtype_name(info.param)); });

TEST_F(GpuBits, NormOfMoreThan2To31ElementsEqualsTheCpu) {
  constexpr int64_t kNumel = (int64_t{1} << 31) + 100003;
  const std::vector<float> period = values(random_, kPeriod, 0.02f, false);
  std::byte* grad = take(static_cast<size_t>(kNumel) * 4);
  queue().upload(grad, period.data(), kPeriod * 4);
  repeat(grad, kPeriod * 4, static_cast<size_t>(kNumel) * 4);
  RoundGradArgs args;
  args.grad = reinterpret_cast<const float*>(grad);
  args.rounded = take(static_cast<size_t>(kNumel) * 2);
  args.square_sum = reinterpret_cast<double*>(take(sizeof(double)));
  args.first_nonfinite = reinterpret_cast<int64_t*>(take(sizeof(int64_t)));
  args.scratch = take(ops().grad_norm_scratch_bytes(kNumel));
  args.numel = kNumel;
  args.out_dtype = DType::kBF16;
  ops().round_grad(queue(), args);

  const Bytes rounded = encode(period, DType::kBF16);
  std::vector<double> sums(static_cast<size_t>(ceil_div(kNumel, kNormChunk)));
  double scratch = 0;
  for (size_t chunk = 0; chunk < sums.size(); ++chunk) {
    const int64_t begin = static_cast<int64_t>(chunk) * kNormChunk;
    sums[chunk] = grad_square_sum(rounded.data() + begin % kPeriod * 2, DType::kBF16,
                                  std::min(kNormChunk, kNumel - begin), &scratch, 1)
                      .sum;
  }
  const double expected = fold_chunk_sums(sums.data(), static_cast<int64_t>(sums.size()));
  EXPECT_EQ(std::bit_cast<uint64_t>(get_one(args.square_sum)), std::bit_cast<uint64_t>(expected));
  EXPECT_EQ(get_one(args.first_nonfinite), -1);
  const Bytes tail = get(static_cast<std::byte*>(args.rounded) + (kNumel - 3) * 2, 6);
  for (int64_t i = 0; i < 3; ++i) {
    const auto at = static_cast<size_t>((kNumel - 3 + i) % kPeriod * 2);
    EXPECT_EQ(std::memcmp(tail.data() + 2 * i, rounded.data() + at, 2), 0) << i;
  }

  // An infinity behind the 2^31st element is found.
  const int64_t bad = kNumel - 11;
  const float infinity = std::numeric_limits<float>::infinity();
  queue().upload(grad + bad * 4, &infinity, 4);
  ops().round_grad(queue(), args);
  EXPECT_EQ(get_one(args.first_nonfinite), bad);
}

TEST_F(GpuBits, FinishNormEqualsTheHostArithmetic) {
  std::uniform_real_distribution<double> uniform(0.0, 1e3);
  for (const float max_norm : {0.0f, 1.0f, 1e6f}) {
    for (const float loss_scale : {1.0f, 65536.0f}) {
      std::vector<double> sums(257);
      double sum = 0;
      for (double& value : sums) sum += value = uniform(random_);
      const std::vector<int64_t> finite(sums.size(), -1);
      FinishNormArgs args;
      args.square_sums = put(sums);
      args.first_nonfinite = put(finite);
      args.params = static_cast<int64_t>(sums.size());
      args.max_norm = max_norm;
      args.loss_scale = loss_scale;
      args.out = reinterpret_cast<StepScalars*>(take(sizeof(StepScalars)));
      ops().finish_norm(queue(), args);
      const StepScalars result = get_one(args.out);
      const double norm = std::sqrt(sum) / static_cast<double>(loss_scale);
      const double clip =
          max_norm > 0 ? std::min(1.0, static_cast<double>(max_norm) / (norm + 1e-6)) : 1.0;
      EXPECT_EQ(result.grad_norm, norm);
      EXPECT_EQ(result.grad_scale, static_cast<float>(clip / static_cast<double>(loss_scale)));
      EXPECT_EQ(result.skip, 0);
    }
  }
}

}  // namespace

GpuEnvironment& gpu() { return *environment; }

}  // namespace orlop::test
