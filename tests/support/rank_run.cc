#include "tests/support/rank_run.h"

#include <cmath>
#include <memory>
#include <mutex>

#include "base/check.h"
#include "comm/thread_communicator.h"
#include "engine/open_engine.h"
#include "engine/ranks.h"

namespace orlop::test {
namespace {

::testing::AssertionResult close_values(const char* what, const std::vector<double>& expected,
                                        const std::vector<double>& found) {
  if (expected.size() != found.size()) {
    return ::testing::AssertionFailure()
           << what << ": " << found.size() << " values instead of " << expected.size();
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    // So that a NaN is not close.
    if (std::abs(found[i] - expected[i]) <= kLossBound * expected[i]) continue;
    return ::testing::AssertionFailure() << fmt::format(
               "{} of step {}: {:.17g} instead of {:.17g}, {:.1e} apart; the bound is {}", what,
               i + 1, found[i], expected[i], std::abs(found[i] / expected[i] - 1), kLossBound);
  }
  return ::testing::AssertionSuccess();
}

}  // namespace

EngineConfig rank_config(Precision precision) {
  EngineConfig config = tiny_engine_config(precision);
  config.batch.accumulation_steps = 12;
  config.batch.micro_batch_size = 1;
  config.optimizer.learning_rate = 1e-4;
  return config;
}

void run_engines(int world_size, const std::string& model, const EngineConfig& config,
                 const std::function<void(Engine&)>& body) {
  run_ranks(world_size, issue_on_host_queue, [&](Communicator& communicator) {
    const std::shared_ptr<Communicator> rank(std::shared_ptr<void>(), &communicator);
    const auto engine = open_engine(model, config, rank);
    body(*engine);
  });
}

std::vector<MicroBatch> share_of(const std::vector<MicroBatch>& batches, int rank, int world_size) {
  std::vector<MicroBatch> share;
  for (size_t i = static_cast<size_t>(rank); i < batches.size();
       i += static_cast<size_t>(world_size)) {
    share.push_back(batches[i]);
  }
  return share;
}

RunRecord run_share(Engine& engine, int64_t all_micro_batches, const RunOptions& options) {
  EngineConfig all = engine.config();
  all.batch.accumulation_steps = all_micro_batches;
  RunRecord record;
  for (int64_t step = options.from; step <= options.until; ++step) {
    std::vector<MicroBatch> batches = batches_of_step(all, options.vocab, step);
    if (step == options.last && batches.size() > 1) batches.pop_back();
    if (options.evaluate_between) {
      engine.evaluate(share_of(batches_of_step(all, options.vocab, 100 + step), engine.rank(),
                               engine.world_size()));
    }
    const StepResult result = engine.step(share_of(batches, engine.rank(), engine.world_size()));
    record.losses.push_back(result.loss);
    record.norms.push_back(result.grad_norm);
    record.skipped.push_back(result.skipped);
  }
  record.states = read_states(engine);
  return record;
}

RunRecord run_on_ranks(int world_size, const std::string& model, EngineConfig config,
                       const RunOptions& options) {
  const int64_t all_micro_batches = config.batch.accumulation_steps;
  config.batch.accumulation_steps =
      (all_micro_batches + world_size - 1) / static_cast<int64_t>(world_size);
  std::mutex mutex;
  std::vector<RunRecord> records;
  run_engines(world_size, model, config, [&](Engine& engine) {
    RunRecord record = run_share(engine, all_micro_batches, options);
    std::lock_guard lock(mutex);
    records.push_back(std::move(record));
  });
  for (const RunRecord& record : records) EXPECT_TRUE(same_bits(records.front(), record));
  return records.front();
}

::testing::AssertionResult close_states(const States& expected, const States& found) {
  if (expected.size() != found.size()) {
    return ::testing::AssertionFailure() << found.size() << " states, not " << expected.size();
  }
  for (const auto& [name, values] : expected) {
    const std::vector<float>& others = found.at(name);
    double difference = 0;
    double norm = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      difference += std::pow(static_cast<double>(others[i]) - static_cast<double>(values[i]), 2);
      norm += std::pow(static_cast<double>(values[i]), 2);
    }
    const double bound = name.ends_with(".master") ? kMasterBound : kMomentBound;
    if (!(std::sqrt(difference) <= bound * std::sqrt(norm))) {
      return ::testing::AssertionFailure()
             << name << ": relative difference " << std::sqrt(difference / norm);
    }
  }
  return ::testing::AssertionSuccess();
}

::testing::AssertionResult close_losses(const RunRecord& expected, const RunRecord& found) {
  const auto losses = close_values("loss", expected.losses, found.losses);
  return losses ? close_values("norm", expected.norms, found.norms) : losses;
}

}  // namespace orlop::test
