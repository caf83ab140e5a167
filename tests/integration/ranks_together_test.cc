// What all ranks of an engine do together: refuse what one of them is given, end where the data of
// one ends, and learn of a call that one makes alone.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/types.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cpu_adam/cpu_features.h"
#include "orlop/error.h"
#include "tests/formats/support.h"
#include "tests/support/rank_run.h"
#include "tests/support/tiny_model.h"

namespace orlop::test {
namespace {

class Ranks : public ::testing::Test {
 protected:
  Ranks() { write_tiny_model(folder_.path(), TinyFamily::kLlama); }
  std::string model() const { return folder_.path().string(); }

  TempFolder folder_;
};

TEST_F(Ranks, RefuseTogetherWhatOneIsGiven) {
  EngineConfig config = rank_config(Precision::kBF16);
  config.batch.accumulation_steps = 2;
  std::atomic<int> refused{0};
  run_engines(3, model(), config, [&](Engine& engine) {
    std::vector<MicroBatch> batches = random_batches(2, config.batch, 61, 5);
    std::vector<MicroBatch> bad = batches;
    if (engine.rank() == 1) bad[1].tokens[3] = 61;
    const States before = read_states(engine);
    try {
      engine.step(bad);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidData);
      EXPECT_THAT(error.what(), testing::HasSubstr("token id 61 at position 3"));
      if (engine.rank() != 1) {
        EXPECT_THAT(error.what(), testing::HasSubstr("rank 1: "));
      }
      refused.fetch_add(1);
    }
    EXPECT_TRUE(same_states(before, read_states(engine)));
    EXPECT_EQ(engine.step(batches).step, 1);
  });
  EXPECT_EQ(refused.load(), 3);
}

TEST_F(Ranks, WithoutMicroBatchesEndTogetherWithTheOthers) {
  const EngineConfig config = rank_config(Precision::kF32);
  const std::vector<MicroBatch> batches = random_batches(2, config.batch, 61, 5);
  const auto single = Engine::open(model(), config);
  const StepResult expected = single->step(batches);
  const double expected_eval = single->evaluate(batches).loss;
  run_engines(4, model(), config, [&](Engine& engine) {
    const std::vector<MicroBatch> share = share_of(batches, engine.rank(), 4);
    const StepResult found = engine.step(share);
    EXPECT_NEAR(found.loss, expected.loss, kLossBound * expected.loss);
    EXPECT_NEAR(found.grad_norm, expected.grad_norm, kLossBound * expected.grad_norm);
    EXPECT_EQ(found.labelled_tokens, expected.labelled_tokens);
    EXPECT_EQ(found.tokens, expected.tokens);
    EXPECT_NEAR(engine.evaluate(share).loss, expected_eval, kLossBound * expected_eval);
    EXPECT_THROW(engine.step({}), Error) << "no rank has any";
  });
}

// Case D-13: what all must call, called by one while the others go on.
TEST_F(Ranks, AreToldWhatOneCallsAlone) {
  const EngineConfig config = rank_config(Precision::kF32);
  const std::vector<MicroBatch> batches = random_batches(1, config.batch, 61, 5);
  const std::string name = "model.norm.weight";
  std::vector<float> values(32);
  const std::vector<std::pair<const char*, std::function<void(Engine&)>>> helpers = {
      {"broadcast of 128 U8 (read_state model.norm.weight)",
       [&](Engine& engine) { engine.read_state(name, StateKind::kMaster, values); }},
      {"(evaluation)", [&](Engine& engine) { engine.evaluate(batches); }},
      {"(save_checkpoint)",
       [&](Engine& engine) { engine.save_checkpoint((folder_ / "run").string(), "", 1); }},
      {"(export)", [&](Engine& engine) { engine.export_hf((folder_ / "hf").string()); }}};
  for (const auto& [told, helper] : helpers) {
    std::atomic<int> failures{0};
    run_engines(3, model(), config, [&, told = told, &helper = helper](Engine& engine) {
      try {
        if (engine.rank() == 0) {
          helper(engine);
        } else {
          engine.step(batches);
        }
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kCommunicator);
        EXPECT_THAT(error.what(), testing::HasSubstr("rank 0 calls "));
        EXPECT_THAT(error.what(), testing::HasSubstr(told));
        EXPECT_THAT(error.what(), testing::HasSubstr("(labelled tokens)"));
        failures.fetch_add(1);
      }
    });
    EXPECT_EQ(failures.load(), 3) << told;
  }
}

// Of the threads of this process that carry `name`: which logical CPUs each may run on.
std::map<pid_t, std::vector<int>> cpus_of_threads(const std::string& name) {
  std::map<pid_t, std::vector<int>> found;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string named;
    std::getline(std::ifstream(task.path() / "comm"), named);
    if (named != name) continue;
    const pid_t thread = std::stoi(task.path().filename().string());
    cpu_set_t cpus;
    if (sched_getaffinity(thread, sizeof(cpus), &cpus) != 0) continue;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(static_cast<size_t>(cpu), &cpus)) found[thread].push_back(cpu);
    }
  }
  return found;
}

// Case P-03: those that update; the slice of host memory lies beside them
// (tests/memory/host_arena_test).
TEST_F(Ranks, HaveCoresOfTheirOwn) {
  const std::vector<int> all = allowed_cpus();
  if (physical_cores(all) < 2) GTEST_SKIP() << "one core";
  std::mutex mutex;
  std::map<pid_t, std::vector<int>> optimizers;
  run_engines(2, model(), rank_config(Precision::kBF16), [&](Engine&) {
    const std::lock_guard lock(mutex);
    optimizers.merge(cpus_of_threads("optimizer"));
  });
  EXPECT_EQ(optimizers.size(), 2u);
  std::vector<int> taken;
  for (const auto& [thread, cpus] : optimizers) {
    EXPECT_FALSE(cpus.empty());
    taken.insert(taken.end(), cpus.begin(), cpus.end());
  }
  std::sort(taken.begin(), taken.end());
  EXPECT_EQ(std::adjacent_find(taken.begin(), taken.end()), taken.end()) << "shared by two ranks";
  EXPECT_TRUE(std::includes(all.begin(), all.end(), taken.begin(), taken.end()));
}

TEST_F(Ranks, KeepAPartOfTheStatesEach) {
  const EngineConfig config = rank_config(Precision::kBF16);
  const size_t whole = Engine::plan(model(), config).state_bytes;
  for (const int ranks : {2, 3, 4}) {
    const PlanReport report = Engine::plan(model(), config, ranks);
    EXPECT_EQ(report.ranks, ranks);
    EXPECT_EQ(report.tokens_per_step, ranks * Engine::plan(model(), config).tokens_per_step);
    EXPECT_NE(report.to_text().find("each of " + std::to_string(ranks) + " ranks"),
              std::string::npos);
    const size_t part = report.state_bytes;
    const size_t padding = 5u * 128 * 12;  // of each FlatParam less than one granule
    EXPECT_GE(part * static_cast<size_t>(ranks), whole);
    EXPECT_LE(part, whole / static_cast<size_t>(ranks) + padding);
  }
}

}  // namespace
}  // namespace orlop::test
