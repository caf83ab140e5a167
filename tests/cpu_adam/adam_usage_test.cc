// What adam_step refuses, before any byte changes, and what it says then.

#include <cmath>
#include <functional>

#include "adam_test_support.h"
#include "orlop/error.h"

namespace orlop::test {
namespace {

constexpr Layout kSplit{DType::kBF16, DType::kF32, DType::kBF16};

void expect_refused(const AdamShard& shard, const AdamHyper& hyper, float grad_scale, int threads,
                    const std::string& text) {
  try {
    adam_step(shard, hyper, grad_scale, threads);
    ADD_FAILURE() << "accepted, but expected: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

// One wrong thing at a time in a shard that is otherwise right.
void expect_shard_refused(const Layout& layout, const std::function<void(AdamShard&)>& spoil,
                          const std::string& text) {
  OwnedShard owned(layout, 100, 1);
  const OwnedShard before = owned;
  AdamShard shard = owned.view();
  spoil(shard);
  expect_refused(shard, {}, 1.0f, 1, text);
  EXPECT_TRUE(same_bits(owned, before)) << "bytes changed before: " << text;
}

TEST(CpuAdamUsage, RefusesDtypesThatNoLayoutHas) {
  expect_shard_refused(
      kSplit, [](AdamShard& s) { s.grad_dtype = DType::kF64; }, "F64");
  expect_shard_refused(
      kSplit, [](AdamShard& s) { s.grad_dtype = DType::kI32; }, "I32");
  expect_shard_refused(
      kSplit, [](AdamShard& s) { s.moment_dtype = DType::kF16; }, "F16");
  expect_shard_refused(
      kSplit, [](AdamShard& s) { s.compute_dtype = DType::kF64; }, "F64");
}

TEST(CpuAdamUsage, RefusesMissingAndSurplusPlanesByName) {
  expect_shard_refused(
      kSplit, [](AdamShard& s) { s.param = nullptr; }, "param is null");
  expect_shard_refused(
      kSplit, [](AdamShard& s) { s.lo = nullptr; }, "lo is null");
  expect_shard_refused(
      kSplit, [](AdamShard& s) { s.exp_avg = nullptr; }, "exp_avg is null");
  expect_shard_refused(
      kSplit, [](AdamShard& s) { s.exp_avg_sq = nullptr; }, "exp_avg_sq is null");
  expect_shard_refused(
      kSplit, [](AdamShard& s) { s.grad = nullptr; }, "grad is null");
  std::vector<float> surplus(100);
  expect_shard_refused(
      kSplit, [&](AdamShard& s) { s.master = surplus.data(); }, "BF16 compute has no such plane");
  const Layout half{DType::kF16, DType::kF32, DType::kF16};
  expect_shard_refused(
      half, [](AdamShard& s) { s.master = nullptr; }, "master is null");
  expect_shard_refused(
      {DType::kF32, DType::kF32, DType::kF32}, [&](AdamShard& s) { s.param = surplus.data(); },
      "F32 compute");
}

// Two states written to the same memory, wholly or in part, would be a silent loss.
TEST(CpuAdamUsage, RefusesOverlappingPlanes) {
  expect_shard_refused(
      kSplit, [](AdamShard& s) { s.exp_avg_sq = s.exp_avg; }, "overlaps");
  expect_shard_refused(
      kSplit, [](AdamShard& s) { s.exp_avg_sq = static_cast<float*>(s.exp_avg) + 99; }, "overlaps");
  expect_shard_refused(
      kSplit, [](AdamShard& s) { s.grad = s.param; }, "overlaps");
  std::vector<float> pair(200);
  OwnedShard owned(kSplit, 100, 1);
  AdamShard shard = owned.view();
  shard.exp_avg = pair.data();
  shard.exp_avg_sq = pair.data() + 100;  // adjacent is no overlap
  EXPECT_NO_THROW(adam_step(shard, {}, 1.0f, 1));
}

TEST(CpuAdamUsage, RefusesMisalignedPlanes) {
  expect_shard_refused(
      kSplit, [](AdamShard& s) { s.exp_avg = static_cast<char*>(s.exp_avg) + 2; }, "not aligned");
}

TEST(CpuAdamUsage, RefusesImpossibleSizes) {
  expect_shard_refused(
      kSplit, [](AdamShard& s) { s.numel = -1; }, "numel = -1");
  expect_shard_refused(
      kSplit, [](AdamShard& s) { s.rng_offset = INT64_MAX - 5; }, "rng_offset");
}

TEST(CpuAdamUsage, RefusesHyperparametersOutsideTheirRange) {
  OwnedShard owned(kSplit, 100, 1);
  const OwnedShard before = owned;
  const AdamShard shard = owned.view();
  expect_refused(shard, {.lr = -1e-3}, 1, 1, "lr = -0.001");
  expect_refused(shard, {.lr = NAN}, 1, 1, "lr = nan");
  expect_refused(shard, {.beta1 = 1.0}, 1, 1, "beta1 = 1");
  expect_refused(shard, {.beta2 = -0.1}, 1, 1, "beta2 = -0.1");
  expect_refused(shard, {.eps = -1e-8}, 1, 1, "eps");
  expect_refused(shard, {.weight_decay = INFINITY}, 1, 1, "weight_decay = inf");
  expect_refused(shard, {.step = 0}, 1, 1, "step = 0");
  expect_refused(shard, {}, NAN, 1, "grad_scale = nan");
  expect_refused(shard, {}, 1, 0, "threads = 0");
  EXPECT_TRUE(same_bits(owned, before));
}

TEST(CpuAdamUsage, AnEmptyShardNeedsNoPlanes) {
  EXPECT_NO_THROW(adam_step(AdamShard{}, {}, 1.0f, 4));
}

}  // namespace
}  // namespace orlop::test
