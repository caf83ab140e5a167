#include "bench/step_compute.h"

#include <fmt/format.h>

#include <memory>

#include "base/bytes.h"
#include "bench/step_setup.h"
#include "engine/model_files.h"
#include "engine/ranks.h"
#include "engine/session.h"

namespace orlop::bench {
namespace {

ComputeTimes measure(Session& session, std::span<const MicroBatch> batches, int steps) {
  ComputeTimes times;
  for (const double block : session.input().forward_flops) times.flops += 3 * block;
  times.flops *= static_cast<double>(batches.size());
  WalkInput input;
  input.batches = batches;
  input.max_grad_norm = 1;
  std::vector<double> step;
  std::vector<double> forward;
  for (int i = 0; i < steps + 2; ++i) {
    const double seconds =
        seconds_of([&] { session.executor().walk(session.train_plan(), input); });
    if (i >= 2) step.push_back(seconds);
  }
  for (int i = 0; i < steps + 1; ++i) {
    const double seconds = seconds_of([&] {
      for (const MicroBatch& batch : batches) {
        WalkInput one;
        one.batches = {&batch, 1};
        session.executor().walk(session.eval_plan(), one);
      }
    });
    if (i >= 1) forward.push_back(seconds);
  }
  times.step = summarize(step);
  times.forward = summarize(forward);
  return times;
}

}  // namespace

std::vector<ComputeTimes> measure_compute(const std::string& model_dir, EngineConfig config,
                                          int steps, std::span<const int64_t> micro_batches) {
  config.placement = {};
  config.placement.device_optimizer_blocks = 0;
  config.limits.device_bytes.reset();
  const std::unique_ptr<Communicator> ranks = one_rank();
  Session session(make_planning(model_dir, config, {}, nullptr), config, *ranks, nullptr);
  // Zeros would draw less power and run faster than real weights.
  init_weights(session.layout(), config.seed, session.planning().threads, session.states());
  fmt::print("compute-only placement: {} of {} FlatParams resident, device {}\n",
             session.planning().report.resident_blocks, session.planning().report.blocks,
             format_bytes(session.planning().report.device_peak_bytes));
  const std::vector<MicroBatch> batches =
      random_batches(config, session.planning().model.vocab_size);
  std::vector<ComputeTimes> times;
  for (const int64_t count : micro_batches) {
    times.push_back(measure(session, std::span(batches).first(static_cast<size_t>(count)), steps));
  }
  return times;
}

}  // namespace orlop::bench
