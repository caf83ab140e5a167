#include "tests/support/rank_run.h"

#include <memory>
#include <mutex>

#include "comm/thread_communicator.h"
#include "engine/open_engine.h"
#include "engine/ranks.h"

namespace orlop::test {

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

}  // namespace orlop::test
