// What the traces of real ranks, on threads, tell of their waits.

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

#include "bench/support/rank_waits.h"
#include "tests/formats/support.h"
#include "tests/support/rank_run.h"
#include "tests/support/tiny_model.h"

namespace orlop::bench {
namespace {

using Clock = std::chrono::steady_clock;

struct Traced {
  std::vector<std::vector<TraceSpan>> traces{2};
  std::vector<double> seconds = std::vector<double>(2);  // of the traced steps
};

// Two ranks; the first has no micro-batch, the second all of them.
Traced trace_unequal_ranks() {
  const test::TempFolder folder;
  test::TinyShape shape;
  shape.hidden = 128;  // so that a step is work, not its overhead
  shape.intermediate = 384;
  test::write_tiny_model(folder / "model", test::TinyFamily::kLlama, shape);
  EngineConfig config = test::rank_config(Precision::kF32);
  config.batch.micro_batch_size = 8;
  Traced result;
  test::run_engines(2, (folder / "model").string(), config, [&](Engine& engine) {
    const auto rank = static_cast<size_t>(engine.rank());
    std::vector<MicroBatch> batches;
    if (rank == 1) batches = test::random_batches(12, config.batch, 61, 5);
    engine.step(batches);
    engine.start_trace();
    const Clock::time_point begin = Clock::now();
    for (int step = 0; step < 3; ++step) engine.step(batches);
    result.seconds[rank] = std::chrono::duration<double>(Clock::now() - begin).count();
    const std::string path = (folder / ("trace-" + std::to_string(rank) + ".json")).string();
    engine.write_trace(path);
    result.traces[rank] = read_trace(path);
  });
  return result;
}

TEST(RankWaitsOfARun, ARankWithoutWorkWaitsForTheOther) {
  const Traced traced = trace_unequal_ranks();
  const std::vector<RankWaits> waits = rank_waits(traced.traces);
  for (size_t rank = 0; rank < 2; ++rank) {
    const RankWaits& own = waits[rank];
    EXPECT_GT(own.exposed_seconds, 0);
    EXPECT_LE(own.compute_seconds + own.own_seconds() + own.others_seconds() + own.exposed_seconds,
              traced.seconds[rank])
        << "rank " << rank;
  }
  EXPECT_GT(waits[0].others_seconds(), 2 * waits[0].exposed_seconds);
  EXPECT_GT(waits[0].others_seconds(), waits[1].others_seconds());
  EXPECT_GT(waits[0].others.at("compute"), 0);
  EXPECT_GT(waits[1].compute_seconds, waits[0].compute_seconds);
}

}  // namespace
}  // namespace orlop::bench
