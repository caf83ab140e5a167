// TensorOptimizer: the bits of adam_step() on a thread of its own, growth, errors, forks.

#include "orlop/tensor_optimizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "base/half.h"
#include "orlop/error.h"
#include "tests/support/error_of.h"

namespace orlop::test {
namespace {

using ::testing::HasSubstr;

std::vector<float> random_floats(int64_t numel, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(numel));
  for (float& value : values) value = normal(random);
  return values;
}

TensorSpec fp32_spec(const std::string& name, std::vector<float>& weights) {
  TensorSpec spec;
  spec.name = name;
  spec.numel = static_cast<int64_t>(weights.size());
  spec.weights = weights.data();
  return spec;
}

GradientView view(const std::vector<float>& gradient) {
  return {gradient.data(), DType::kF32, static_cast<int64_t>(gradient.size())};
}

TensorUpdate make_update(int64_t tensor, const std::vector<float>& gradient, int64_t step) {
  AdamHyper hyper;
  hyper.step = step;
  hyper.weight_decay = 0.1;
  return {tensor, view(gradient), hyper, {}};
}

TEST(TensorOptimizer, UpdatesHaveTheBitsOfAdamStep) {
  for (const int64_t numel : {int64_t{0}, int64_t{1}, int64_t{4095}, int64_t{100003}}) {
    std::vector<float> ours = random_floats(numel, 1);
    std::vector<float> expected = ours;
    std::vector<float> exp_avg(ours.size());
    std::vector<float> exp_avg_sq(ours.size());
    TensorOptimizer optimizer(2);
    const int64_t tensor = optimizer.add(std::vector{fp32_spec("w", ours)});
    for (int64_t step = 1; step <= 5; ++step) {
      const std::vector<float> gradient = random_floats(numel, static_cast<uint32_t>(step) + 10);
      const TensorUpdate update = make_update(tensor, gradient, step);
      optimizer.update(std::vector{update}, 0.5f, step);
      optimizer.wait(tensor);
      AdamShard shard;
      shard.compute_dtype = shard.grad_dtype = DType::kF32;
      shard.master = expected.data();
      shard.exp_avg = exp_avg.data();
      shard.exp_avg_sq = exp_avg_sq.data();
      shard.grad = gradient.data();
      shard.numel = numel;
      adam_step(shard, update.hyper, 0.5f, 1);
      ASSERT_EQ(ours, expected) << "numel " << numel << ", step " << step;
    }
    std::vector<float> master(ours.size());
    optimizer.read_master(tensor, master);
    EXPECT_EQ(master, ours);
  }
}

TEST(TensorOptimizer, GrowsWithoutMovingWhatIsThere) {
  TensorOptimizer optimizer(1);
  std::vector<std::vector<float>> weights;
  for (uint32_t i = 0; i < 20; ++i) weights.push_back(random_floats(1000 + i, i));
  const std::vector<float> gradient = random_floats(1000, 99);
  std::vector<const void*> moments;
  for (size_t i = 0; i < weights.size(); ++i) {
    EXPECT_EQ(optimizer.add(std::vector{fp32_spec("w", weights[i])}), static_cast<int64_t>(i));
    moments.push_back(optimizer.states(static_cast<int64_t>(i)).exp_avg);
    // An update of the first tensor runs while the next is added.
    optimizer.update(std::vector{make_update(0, gradient, static_cast<int64_t>(i) + 1)}, 1.0f, 1);
  }
  optimizer.synchronize();
  for (size_t i = 0; i < weights.size(); ++i) {
    EXPECT_EQ(optimizer.states(static_cast<int64_t>(i)).exp_avg, moments[i]);
  }
  size_t bytes = 0;
  for (const TensorMemory& held : optimizer.memory_report()) {
    if (held.purpose == "moments") bytes = held.bytes;
  }
  EXPECT_EQ(bytes, 8u * (20 * 1000 + 190));
}

TEST(TensorOptimizer, StatesOutliveTheOptimizer) {
  std::vector<float> weights = random_floats(1000, 1);
  const std::vector<float> gradient = random_floats(1000, 2);
  std::shared_ptr<const void> memory;
  const float* exp_avg = nullptr;
  {
    TensorOptimizer optimizer(1);
    optimizer.add(std::vector{fp32_spec("w", weights)});
    optimizer.update(std::vector{make_update(0, gradient, 1)}, 1.0f, 1);
    memory = optimizer.memory(0);
    exp_avg = static_cast<const float*>(optimizer.states(0).exp_avg);
  }
  EXPECT_NEAR(exp_avg[7], 0.1f * gradient[7], 1e-6f);
}

// A gradient that arrives when the test says so.
struct Arrival {
  std::atomic<int> status{-1};
  static int wait(void* handle) {
    auto& arrival = *static_cast<Arrival*>(handle);
    arrival.status.wait(-1);
    return arrival.status.load();
  }
  void end(int value) {
    status = value;
    status.notify_all();
  }
};

TEST(TensorOptimizer, WaitsForArrivalsAndWritesInOrder) {
  std::vector<float> first = random_floats(100, 1);
  std::vector<float> second = random_floats(100, 2);
  const std::vector<float> before = second;
  const std::vector<float> gradient = random_floats(100, 3);
  Arrival arrival;
  TensorOptimizer optimizer(1);
  optimizer.add(std::vector{fp32_spec("a", first), fp32_spec("b", second)});
  std::vector<TensorUpdate> updates{make_update(0, gradient, 1), make_update(1, gradient, 1)};
  updates[1].arrived = {&Arrival::wait, &arrival};
  const uint32_t version = optimizer.update(updates, 1.0f, 1);
  optimizer.wait(0);
  EXPECT_EQ(*optimizer.states(0).written_version, version);
  EXPECT_EQ(second, before);
  arrival.end(0);
  optimizer.wait(1);
  EXPECT_NE(second, before);
}

TEST(TensorOptimizer, FailureReachesEveryWaiterAndNamesTheStep) {
  std::vector<float> weights = random_floats(100, 1);
  std::vector<float> other = random_floats(100, 2);
  const std::vector<float> before = weights;
  const std::vector<float> gradient = random_floats(100, 3);
  Arrival arrival;
  TensorOptimizer optimizer(1);
  optimizer.add(std::vector{fp32_spec("layer.weight", weights), fp32_spec("other", other)});
  TensorUpdate update = make_update(0, gradient, 1);
  update.arrived = {&Arrival::wait, &arrival};
  optimizer.update(std::vector{update}, 1.0f, 12);
  optimizer.update(std::vector{make_update(1, gradient, 1)}, 1.0f, 13);
  std::thread later([&] { arrival.end(700); });
  const std::string text = error_of(ErrorCode::kDevice, [&] { optimizer.wait(1); });
  later.join();
  EXPECT_THAT(text, HasSubstr("update of step 12"));
  EXPECT_THAT(text, HasSubstr("'layer.weight'"));
  EXPECT_THAT(text, HasSubstr("700"));
  EXPECT_EQ(*optimizer.states(1).written_version, kFailedVersion);
  EXPECT_EQ(weights, before);
  EXPECT_EQ(error_of(ErrorCode::kDevice, [&] { optimizer.wait(0); }), text);
  EXPECT_EQ(error_of(ErrorCode::kDevice, [&] { optimizer.synchronize(); }), text);
  EXPECT_EQ(error_of(ErrorCode::kDevice,
                     [&] { optimizer.update(std::vector{make_update(1, gradient, 1)}, 1, 14); }),
            text);
}

TEST(TensorOptimizer, RefusesBeforeAnythingChanges) {
  std::vector<float> weights = random_floats(100, 1);
  const std::vector<float> before = weights;
  const std::vector<float> gradient = random_floats(100, 3);
  const std::vector<float> shorter = random_floats(99, 3);
  TensorOptimizer optimizer(1);
  optimizer.add(std::vector{fp32_spec("w", weights)});
  const auto refused = [&](const TensorUpdate& update, float scale) {
    return error_of(ErrorCode::kUsage, [&] {
      optimizer.update(std::vector{make_update(0, gradient, 1), update}, scale, 1);
    });
  };
  EXPECT_THAT(refused(make_update(1, gradient, 1), 1.0f), HasSubstr("tensor 1 of 1"));
  EXPECT_THAT(refused(make_update(0, shorter, 1), 1.0f), HasSubstr("99 elements"));
  EXPECT_THAT(refused(make_update(0, gradient, 0), 1.0f), HasSubstr("step = 0"));
  EXPECT_THAT(refused(make_update(0, gradient, 1), NAN), HasSubstr("grad_scale"));
  TensorUpdate update = make_update(0, gradient, 1);
  update.gradient.dtype = DType::kF64;
  EXPECT_THAT(refused(update, 1.0f), HasSubstr("F64"));
  TensorSpec spec = fp32_spec("bad", weights);
  spec.dtype = DType::kI32;
  EXPECT_THAT(error_of(ErrorCode::kUsage, [&] { optimizer.add(std::vector{spec}); }),
              HasSubstr("'bad'"));
  spec = fp32_spec("large", weights);
  spec.numel = int64_t{1} << 46;
  error_of(ErrorCode::kDoesNotFit, [&] { optimizer.add(std::vector{spec}); });
  optimizer.synchronize();
  EXPECT_EQ(weights, before);
  EXPECT_EQ(optimizer.ranges().size(), 1u);
}

// Weights that the optimizer keeps and gradients, not masters and moments: 4 of 14 bytes.
TEST(TensorOptimizer, ADevicePinsWhatItCopies) {
  TensorOptimizer optimizer(1);
  std::vector<TensorSpec> specs(3);
  for (size_t i = 0; i < specs.size(); ++i) {
    specs[i].name = "p" + std::to_string(i);
    specs[i].dtype = DType::kBF16;
    specs[i].numel = 100'000 + static_cast<int64_t>(i);
    specs[i].keep_gradient = true;
  }
  optimizer.add(specs);
  const std::vector<std::span<std::byte>> ranges = optimizer.ranges();
  ASSERT_EQ(ranges.size(), 1u);
  EXPECT_LE(ranges[0].size(), 4 * size_t{300'003} + 2 * 4096);
  const auto is_pinned = [&](const void* plane, size_t bytes) {
    const auto* begin = static_cast<const std::byte*>(plane);
    return begin >= ranges[0].data() && begin + bytes <= ranges[0].data() + ranges[0].size();
  };
  for (int64_t i = 0; i < 3; ++i) {
    const TensorStates states = optimizer.states(i);
    const auto bytes = 2 * static_cast<size_t>(specs[static_cast<size_t>(i)].numel);
    EXPECT_TRUE(is_pinned(states.weights, bytes));
    EXPECT_TRUE(is_pinned(states.gradient, bytes));
    EXPECT_TRUE(is_pinned(states.written_version, sizeof(uint32_t)));
    for (const void* plane :
         {static_cast<const void*>(states.lo), static_cast<const void*>(states.exp_avg),
          static_cast<const void*>(states.exp_avg_sq)}) {
      EXPECT_GE(plane, ranges[0].data() + ranges[0].size()) << "no part of it";
    }
  }
}

TEST(TensorOptimizer, NormNamesTheFirstBadTensor) {
  TensorOptimizer optimizer(2);
  std::vector<std::vector<float>> gradients{random_floats(5000, 1), random_floats(3, 2),
                                            random_floats(9000, 3)};
  const auto norm = [&] {
    std::vector<GradientView> views;
    for (const auto& gradient : gradients) views.push_back(view(gradient));
    return optimizer.norm(views);
  };
  std::vector<double> scratch(3);
  double expected = 0;
  for (const auto& gradient : gradients) {
    expected += grad_square_sum(gradient.data(), DType::kF32, static_cast<int64_t>(gradient.size()),
                                scratch.data(), 1)
                    .sum;
  }
  EXPECT_EQ(norm().square_sum, expected);
  EXPECT_EQ(norm().first_tensor, -1);
  gradients[2][8999] = INFINITY;
  gradients[1][2] = NAN;
  EXPECT_EQ(norm().first_tensor, 1);
  EXPECT_EQ(norm().first_element, 2);
}

// hi is the caller's; what the caller writes there is where the next update starts.
TEST(TensorOptimizer, ZeroedHalfWeightsNeverBecomeNaN) {
  constexpr int64_t kNumel = 4099;
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    std::vector<uint16_t> weights(kNumel);
    const std::vector<float> values = random_floats(kNumel, 5);
    TensorSpec spec;
    spec.name = "half";
    spec.dtype = dtype;
    spec.numel = kNumel;
    spec.weights = weights.data();
    TensorOptimizer optimizer(2);
    optimizer.add(std::vector{spec});
    optimizer.write_master(0, values);
    std::vector<float> master(kNumel);
    optimizer.read_master(0, master);
    EXPECT_EQ(master, values);
    for (size_t i = 0; i < weights.size(); i += 2) weights[i] = i % 4 == 0 ? 0 : 0x8000;
    const std::vector<uint16_t> pruned = weights;
    const std::vector<float> gradient(kNumel, 1.0f);
    TensorUpdate update = make_update(0, gradient, 1);
    update.hyper.lr = 0;
    optimizer.update(std::vector{update}, 1.0f, 1);
    optimizer.synchronize();
    EXPECT_EQ(weights, pruned);
    optimizer.read_master(0, master);
    for (size_t i = 0; i < master.size(); ++i) {
      if (i % 2 == 0) {
        EXPECT_LT(std::abs(master[i]), 1e-38f) << i;
      } else {
        EXPECT_EQ(master[i], values[i]) << i;
      }
    }
  }
}

TEST(TensorOptimizer, AdoptsAndMovesWeights) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    std::vector<uint16_t> weights(1000);
    TensorSpec spec;
    spec.name = "half";
    spec.dtype = dtype;
    spec.numel = 1000;
    spec.weights = weights.data();
    TensorOptimizer optimizer(1);
    optimizer.add(std::vector{spec});
    const bool is_split = dtype == DType::kBF16;
    std::vector<float> expected = random_floats(1000, 5);
    optimizer.write_master(0, expected);
    std::vector<uint16_t> rest(1000);
    if (is_split) {
      optimizer.read_state(0, StatePlane::kMasterRest, 0, std::as_writable_bytes(std::span(rest)));
    }
    const std::vector<uint16_t> before = weights;
    std::vector<uint16_t> moved = weights;
    const uint16_t seven = is_split ? float_to_bf16(7.0f) : float_to_fp16(7.0f);
    moved[10] = seven;
    expected[10] = is_split ? split_bf16_to_float(seven, rest[10]) : 7.0f;
    optimizer.move_weights(0, moved.data());
    std::vector<float> master(1000);
    optimizer.read_master(0, master);
    EXPECT_EQ(master, expected);
    EXPECT_EQ(optimizer.states(0).weights, moved.data());

    std::vector<uint16_t> other = moved;
    other[20] = seven;
    expected[20] = is_split ? split_bf16_to_float(seven, rest[20]) : 7.0f;
    optimizer.adopt_weights(0, other.data());
    optimizer.read_master(0, master);
    EXPECT_EQ(master, expected);
    EXPECT_EQ(moved, other);
    EXPECT_EQ(weights, before);  // whoever has the old memory
  }
}

TEST(TensorOptimizer, SumsKeptGradients) {
  std::vector<uint16_t> weights(5000);
  TensorSpec spec;
  spec.name = "w";
  spec.dtype = DType::kBF16;
  spec.numel = 5000;
  spec.keep_gradient = true;
  TensorOptimizer optimizer(2);
  optimizer.add(std::vector{spec});
  auto* kept = static_cast<uint16_t*>(optimizer.states(0).gradient);
  std::vector<float> sum(5000, NAN);
  std::vector<float> expected(5000, 0.0f);
  for (int part = 0; part < 3; ++part) {
    const std::vector<float> values = random_floats(5000, static_cast<uint32_t>(part));
    for (size_t i = 0; i < sum.size(); ++i) {
      kept[i] = float_to_bf16(values[i]);
      expected[i] += bf16_to_float(kept[i]);
    }
    optimizer.accumulate(0, sum, part > 0, false, {});
    optimizer.wait(0);
  }
  EXPECT_EQ(sum, expected);
  optimizer.round_sum(0, sum);
  optimizer.wait(0);
  const GradientView view{kept, DType::kBF16, 5000};
  EXPECT_EQ(optimizer.measured(0).square_sum, optimizer.norm(std::vector{view}).square_sum);
  for (size_t i = 0; i < sum.size(); ++i) ASSERT_EQ(kept[i], float_to_bf16(sum[i])) << i;

  // The last micro-batch: added, rounded and measured in one pass.
  const std::vector<float> values = random_floats(5000, 7);
  for (size_t i = 0; i < sum.size(); ++i) {
    kept[i] = float_to_bf16(values[i]);
    expected[i] += bf16_to_float(kept[i]);
  }
  optimizer.accumulate(0, sum, true, true, {});
  optimizer.wait(0);
  EXPECT_EQ(optimizer.measured(0).square_sum, optimizer.norm(std::vector{view}).square_sum);
  EXPECT_EQ(sum, expected);
  for (size_t i = 0; i < sum.size(); ++i) ASSERT_EQ(kept[i], float_to_bf16(sum[i])) << i;
}

TEST(TensorOptimizer, MeasuresBehindItsFence) {
  std::vector<float> weights = random_floats(70001, 1);
  TensorOptimizer optimizer(2);
  TensorSpec spec = fp32_spec("w", weights);
  spec.keep_gradient = true;
  optimizer.add(std::vector{spec, spec});
  auto* gradient = static_cast<float*>(optimizer.states(1).gradient);
  std::fill_n(static_cast<float*>(optimizer.states(0).gradient), 70001, 2.0f);
  static std::vector<float> arriving;
  arriving = random_floats(70001, 2);
  const Fence fence{[](void* target) {
                      std::copy(arriving.begin(), arriving.end(), static_cast<float*>(target));
                      return 0;
                    },
                    gradient};
  const GradientView view{gradient, DType::kF32, 70001};
  const uint32_t version = optimizer.measure(std::vector<int64_t>{1, 0}, fence);
  const GradientNorm found = optimizer.measured(1);
  EXPECT_EQ(*optimizer.states(1).written_version, version);
  EXPECT_EQ(optimizer.measured(0).square_sum, 4.0 * 70001);
  EXPECT_EQ(*optimizer.states(0).written_version, version);
  const GradientNorm expected = optimizer.norm(std::vector{view});
  EXPECT_GT(found.square_sum, 0.0);
  EXPECT_EQ(found.square_sum, expected.square_sum);
  EXPECT_EQ(found.first_element, -1);

  gradient[69999] = std::numeric_limits<float>::infinity();
  optimizer.measure(std::vector<int64_t>{1}, {});
  EXPECT_EQ(optimizer.measured(1).first_element, 69999);
  EXPECT_EQ(optimizer.measured(1).first_tensor, 0);
}

TEST(TensorOptimizer, ReleasedTensorsGiveTheirMemoryBack) {
  std::vector<float> weights = random_floats(5000, 1);
  const std::vector<float> gradient = random_floats(5000, 3);
  TensorOptimizer optimizer(1);
  const TensorSpec spec = fp32_spec("w", weights);
  optimizer.add(std::vector{spec, spec});
  optimizer.add(std::vector{spec});
  EXPECT_EQ(optimizer.ranges().size(), 2u);
  const std::weak_ptr<const void> held = optimizer.memory(0);
  optimizer.update(std::vector{make_update(0, gradient, 1)}, 1.0f, 1);
  optimizer.release(0);
  EXPECT_EQ(optimizer.ranges().size(), 2u);
  EXPECT_FALSE(held.expired());  // the other tensor of the same add() is in it
  optimizer.release(1);
  EXPECT_EQ(optimizer.ranges().size(), 1u);
  EXPECT_TRUE(held.expired());
  const TensorUpdate late = make_update(0, gradient, 2);
  EXPECT_THROW(optimizer.update(std::vector{late}, 1.0f, 2), Error);
  EXPECT_THROW(optimizer.release(0), Error);
  optimizer.update(std::vector{make_update(2, gradient, 1)}, 1.0f, 2);
  optimizer.synchronize();
}

TEST(TensorOptimizer, ForkedChildIsRefusedAndLeavesItAlone) {
  std::vector<float> weights = random_floats(100, 1);
  const std::vector<float> gradient = random_floats(100, 3);
  TensorOptimizer optimizer(1);
  optimizer.add(std::vector{fp32_spec("w", weights)});
  optimizer.update(std::vector{make_update(0, gradient, 1)}, 1.0f, 1);
  auto second = std::make_unique<TensorOptimizer>(1);
  const pid_t child = ::fork();
  if (child == 0) {
    int status = 1;
    try {
      optimizer.synchronize();
    } catch (const Error& error) {
      status = std::strstr(error.what(), "fork") != nullptr ? 0 : 2;
    }
    second.reset();
    ::_exit(status);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  optimizer.synchronize();
}

}  // namespace
}  // namespace orlop::test
