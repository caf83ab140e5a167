// Gradients that travel between ranks in 16 bits: how far that moves a run, what it leaves alone,
// and that half the bytes travel. Equal bits for every stage and placement:
// ranks_equal_single_test.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <memory>
#include <string>

#include "comm/thread_communicator.h"
#include "engine/open_engine.h"
#include "engine/ranks.h"
#include "orlop/error.h"
#include "tests/formats/support.h"
#include "tests/support/rank_run.h"
#include "tests/support/tiny_model.h"

namespace orlop::test {
namespace {

// Of norms beside those of one rank, relative: every contribution is rounded once, by up to 2^-9 of
// itself. Losses move less than by sums in another order (3.7e-7; norms 9.1e-5).
constexpr double kNarrowNormBound = 5e-4;

class GradientWire : public ::testing::Test {
 protected:
  GradientWire() { write_tiny_model(folder_.path(), TinyFamily::kLlamaTied); }
  std::string model() const { return folder_.path().string(); }

  static EngineConfig narrow(Precision precision) {
    EngineConfig config = rank_config(precision);
    config.gradient_wire = DType::kBF16;
    return config;
  }

  TempFolder folder_;
};

TEST_F(GradientWire, StaysWithOneRank) {
  const auto engine = Engine::open(model(), rank_config(Precision::kF32));
  const RunRecord single = run(*engine, {});
  for (const int ranks : {2, 3, 4}) {
    const RunRecord found = run_on_ranks(ranks, model(), narrow(Precision::kF32), {});
    EXPECT_FALSE(same_bits(run_on_ranks(ranks, model(), rank_config(Precision::kF32), {}), found))
        << "nothing was rounded";
    for (size_t i = 0; i < single.losses.size(); ++i) {
      EXPECT_NEAR(found.losses[i], single.losses[i], kLossBound * single.losses[i])
          << ranks << " ranks, step " << i + 1;
      EXPECT_NEAR(found.norms[i], single.norms[i], kNarrowNormBound * single.norms[i])
          << ranks << " ranks, step " << i + 1;
    }
  }
}

TEST_F(GradientWire, OfOneRankIsNone) {
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    const RunOptions options{.until = 3, .last = 3};
    const RunRecord expected = run_on_ranks(1, model(), rank_config(precision), options);
    EXPECT_TRUE(same_bits(expected, run_on_ranks(1, model(), narrow(precision), options)));
  }
  EngineConfig config = narrow(Precision::kBF16);
  config.limits.device_bytes = config.limits.host_bytes = size_t{1} << 30;
  const std::string text = Engine::plan(model(), config).to_text();
  config.gradient_wire = DType::kF32;
  EXPECT_EQ(text, Engine::plan(model(), config).to_text());
}

// Counts what a rank receives from the others on its queue.
class CountingRanks final : public Communicator {
 public:
  explicit CountingRanks(Communicator& ranks) : ranks_(ranks) {}

  uint64_t weights = 0;    // bytes
  uint64_t gradients = 0;  // likewise
  uint64_t norms = 0;      // likewise

  int rank() const override { return ranks_.rank(); }
  int world_size() const override { return ranks_.world_size(); }
  void all_gather(Queue& queue, const void* send, void* recv, int64_t count, DType dtype,
                  std::string_view what) override {
    (what == "norms" ? norms : weights) += received(count, dtype);
    ranks_.all_gather(queue, send, recv, count, dtype, what);
  }
  void reduce_scatter(Queue& queue, const void* send, void* recv, int64_t count, DType dtype,
                      std::string_view what) override {
    gradients += received(count, dtype);
    ranks_.reduce_scatter(queue, send, recv, count, dtype, what);
  }
  void all_to_all(Queue& queue, const void* send, void* recv, int64_t count, DType dtype,
                  std::string_view what) override {
    gradients += received(count, dtype);
    ranks_.all_to_all(queue, send, recv, count, dtype, what);
  }
  void broadcast(Queue& queue, void* buffer, int64_t count, DType dtype, int root,
                 std::string_view what) override {
    ranks_.broadcast(queue, buffer, count, dtype, root, what);
  }
  void all_gather_values(std::span<const std::byte> send, std::span<std::byte> recv,
                         std::string_view what) override {
    ranks_.all_gather_values(send, recv, what);
  }
  void broadcast_values(std::span<std::byte> values, int root, std::string_view what) override {
    ranks_.broadcast_values(values, root, what);
  }
  Communicator& beside() override { return ranks_.beside(); }
  void abort(const std::string& reason) noexcept override { ranks_.abort(reason); }
  std::string failure() const override { return ranks_.failure(); }

 private:
  uint64_t received(int64_t count, DType dtype) const {
    return static_cast<uint64_t>(count * (world_size() - 1)) * dtype_bytes(dtype);
  }

  Communicator& ranks_;
};

TEST_F(GradientWire, CarriesHalfTheBytes) {
  for (const int world_size : {2, 3}) {
    std::array<std::atomic<uint64_t>, 2> gradients{};
    std::array<std::atomic<uint64_t>, 2> weights{};
    for (size_t wire = 0; wire < 2; ++wire) {
      EngineConfig config = wire == 0 ? rank_config(Precision::kBF16) : narrow(Precision::kBF16);
      config.batch.accumulation_steps = 2;
      run_ranks(world_size, issue_on_host_queue, [&](Communicator& threads) {
        const auto ranks = std::make_shared<CountingRanks>(threads);
        const auto engine = open_engine(model(), config, ranks);
        engine->step(random_batches(2, config.batch, 61, 5));
        gradients[wire] += ranks->gradients;
        weights[wire] += ranks->weights;
      });
    }
    EXPECT_GT(gradients[1].load(), 0u);
    EXPECT_EQ(gradients[0].load(), 2 * gradients[1].load()) << world_size << " ranks";
    EXPECT_EQ(weights[0].load(), weights[1].load()) << world_size << " ranks";
  }
}

// The plan holds the bytes in which gradients travel, and the run takes the plan's: with a budget
// of just those it runs, with less it is refused before it starts.
TEST_F(GradientWire, HasItsBytesInThePlan) {
  for (const int world_size : {2, 3}) {
    EngineConfig config = narrow(Precision::kBF16);
    config.batch.accumulation_steps = 2;
    config.placement = {.prefetch_depth = 0,
                        .resident_blocks = 0,
                        .device_optimizer_blocks = 0,
                        .activations = Tier::kHost,
                        .wave = 1};
    config.limits.host_bytes = size_t{1} << 30;
    const PlanReport plan = Engine::plan(model(), config, world_size);
    EXPECT_THAT(plan.to_text(), testing::HasSubstr("which send each other gradients in BF16"));
    EngineConfig wide = config;
    wide.gradient_wire = DType::kF32;
    EXPECT_GT(plan.device_peak_bytes, Engine::plan(model(), wide, world_size).device_peak_bytes);

    config.limits.device_bytes = plan.device_peak_bytes;
    run_engines(world_size, model(), config, [&](Engine& engine) {
      engine.step(random_batches(2, config.batch, 61, 5));
      EXPECT_EQ(engine.plan().device_peak_bytes, plan.device_peak_bytes);
    });
    config.limits.device_bytes = plan.device_peak_bytes - 256;
    EXPECT_THROW(run_engines(world_size, model(), config, [](Engine&) {}), Error);
  }
}

TEST_F(GradientWire, IsTheSameOnAllRanks) {
  std::atomic<int> told{0};
  run_ranks(3, issue_on_host_queue, [&](Communicator& threads) {
    const std::shared_ptr<Communicator> ranks(std::shared_ptr<void>(), &threads);
    EngineConfig config = rank_config(Precision::kBF16);
    if (threads.rank() == 1) config.gradient_wire = DType::kBF16;
    try {
      open_engine(model(), config, ranks);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUsage);
      EXPECT_THAT(error.what(), testing::HasSubstr("gradient_wire is"));
      told.fetch_add(1);
    }
  });
  EXPECT_EQ(told.load(), 3);
}

TEST_F(GradientWire, HasTwoDtypes) {
  EngineConfig config = rank_config(Precision::kF16);
  config.gradient_wire = DType::kF16;
  try {
    Engine::open(model(), config);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("gradient_wire is F16; it may be F32 or BF16"));
  }
}

}  // namespace
}  // namespace orlop::test
