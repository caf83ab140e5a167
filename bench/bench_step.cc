// One training step of the engine, beside its ceiling: the same step's device work alone (weights
// resident, no update), measured in the same run.
//
//   bench_step --shape l3|l7|smollm2|DIR [--tokens 16384] [--sequence 2048] [--micro-batch 8]
//              [--steps 5] [--device auto] [--device-mem 24GiB] [--precision bf16|fp32|fp16]
//              [--resident N] [--device-optimizer N] [--prefetch N] [--clip 1.0] [--threads N]
//              [--activations device|host|nvme] [--only step|compute|copies] [--trace FILE]
//              [--nvme DIR[,DIR...]] [--nvme-optimizer N] [--nvme-params N] [--host-mem 8GiB]:
//              states of all blocks, or of the last N, on drives, see step_drives.h
//   bench_step --only copies ...: copies where they are the bound, see step_copies.h
//   bench_step --gpus N [--shape l7] [--tokens 16384,65536] [--steps 3] ...: the same over N ranks,
//              [--grad-wire fp32|bf16] see step_ranks.h; with --device host N ranks in host memory
//
// On the host device it also times the step's matmuls alone through oneDNN, after every step, and
// tells where the step's time went, operation by operation, as the trace has it.
//
// Counted FLOPs: 2 per multiply-add of matmuls and attention, forward once and backward twice;
// recomputation is not counted (MFU counts the same over the datasheet peak).
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "base/bytes.h"
#include "base/check.h"
#include "bench/step_compute.h"
#include "bench/step_copies.h"
#include "bench/step_drives.h"
#include "bench/step_ranks.h"
#include "bench/step_setup.h"
#include "bench/support/matmul_ceiling.h"
#include "bench/support/memory_ceiling.h"
#include "bench/support/recording_backend.h"
#include "bench/support/samples.h"
#include "bench/support/trace_times.h"
#include "cpu_adam/cpu_features.h"
#include "engine/model_files.h"
#include "engine/ranks.h"
#include "engine/session.h"
#include "orlop/engine.h"

namespace orlop::bench {
namespace {

#ifdef ORLOP_HAVE_ONEDNN
constexpr bool kHasCeiling = true;
#else
constexpr bool kHasCeiling = false;
MatmulCeiling measure_matmuls_alone(std::span<const MatmulArgs>, int) { return {}; }
#endif

// Every matmul of a step, in order.
std::vector<MatmulArgs> step_matmuls(const std::string& model_dir, const EngineConfig& config,
                                     int& threads) {
  std::vector<MatmulArgs> matmuls;
  const std::unique_ptr<Communicator> ranks = one_rank();
  Planning planning = make_planning(model_dir, config, {}, nullptr);
  threads = planning.threads;
  planning.device.backend =
      std::make_unique<RecordingBackend>(std::move(planning.device.backend), matmuls);
  Session session(std::move(planning), config, *ranks, nullptr);
  const std::vector<MicroBatch> batches =
      random_batches(config, session.planning().model.vocab_size);
  WalkInput input;
  input.batches = batches;
  session.executor().walk(session.train_plan(), input);
  return matmuls;
}

void print_operations(const std::string& trace, int steps, double step_seconds) {
  std::vector<std::pair<double, std::string>> rows;
  for (const auto& [name, seconds] : trace_times(trace)) {
    // What queues wait for is somebody else's work.
    if (name.find("wait") == std::string::npos) rows.push_back({seconds / steps, name});
  }
  std::sort(rows.rbegin(), rows.rend());
  for (const auto& [seconds, name] : rows) {
    if (seconds < 1e-3 * step_seconds) break;
    fmt::print("  {:36} {:8.4f} s {:5.1f} %\n", name, seconds, 100 * seconds / step_seconds);
  }
}

// Steps and matmuls alone by turns, so that both meet the same neighbours.
void print_ceilings(const std::vector<MatmulCeiling>& alone, const std::vector<double>& steps) {
  std::vector<double> seconds;
  std::vector<double> ratios;
  for (size_t i = 0; i < steps.size(); ++i) {
    seconds.push_back(alone[i].seconds);
    ratios.push_back(alone[i].seconds / steps[i]);
  }
  const Summary ratio = summarize(ratios);
  const double median = summarize(seconds).median;
  fmt::print(
      "matmuls alone, oneDNN's best format ({} shapes) {:.4f} s, {:.1f} GFLOP/s: {:.3f} of the "
      "step next to it ({:.3f} to {:.3f})\n",
      alone.front().shapes, median, alone.front().flops / median / 1e9, ratio.median, ratio.min,
      ratio.max);
}

// The update at the rate of host memory alone: what no engine that keeps the states there can beat.
// `rate`: bytes per second.
void print_memory_bound(const EngineConfig& config, int64_t numel, double rate,
                        const ComputeTimes& compute, double step_seconds) {
  const double per_element = update_bytes(config) + gradient_bytes(config);
  const double update = static_cast<double>(numel) * per_element / rate;
  const double backward = compute.step.median - compute.forward.median;
  const double bound = backward + std::max(compute.forward.median, update);
  fmt::print(
      "bound backward + max(forward, {:.0f} B x {:.3f} G elements / {:.1f} GB/s) {:.4f} s: step / "
      "bound {:.3f}\n",
      per_element, static_cast<double>(numel) / 1e9, rate / 1e9, bound, step_seconds / bound);
}

void run(const Options& options) {
  if (options.has("gpus")) return run_on_ranks(options);
  const std::string model_dir = shape_folder(options.get("shape", "smollm2"));
  EngineConfig config = make_config(options, options.number("tokens", 16384));
  set_drives(options, model_dir, config);
  const int steps = static_cast<int>(options.number("steps", 5));
  const std::string only = options.get("only", "both");
  if (only == "copies") return measure_copies(model_dir, config, steps);
  const double tokens =
      static_cast<double>(config.batch.accumulation_steps * config.batch.micro_batch_size *
                          config.batch.sequence_length);
  ComputeTimes compute;
  double memory_rate = 0;
  if (only != "step") {
    memory_rate = measure_memory_bytes_per_s(default_threads());
    const int64_t micro_batches = config.batch.accumulation_steps;
    compute = measure_compute(model_dir, config, steps, {&micro_batches, 1}).front();
    print_row("forward + backward, weights resident", compute.step, tokens, compute.flops);
    print_row("  of it forward", compute.forward, tokens, compute.flops / 3);
  }
  if (only == "compute") return;

  const bool on_host = config.device == "host";
  std::vector<MatmulArgs> matmuls;
  int threads = 1;
  if (on_host && kHasCeiling) matmuls = step_matmuls(model_dir, config, threads);
  const std::string trace = options.get(
      "trace",
      (std::filesystem::temp_directory_path() / fmt::format("orlop_bench_step_{}.json", ::getpid()))
          .string());
  const std::unique_ptr<Engine> engine = Engine::open(model_dir, config);
  fmt::print("{}", engine->plan().to_text());
  const std::vector<MicroBatch> batches = random_batches(config, 32000);
  std::vector<MatmulCeiling> alone;
  std::vector<double> seconds;
  Stats before;
  for (int i = 0; i < steps + 2; ++i) {
    if (i == 2) {
      before = engine->stats();
      if (on_host || options.has("trace")) engine->start_trace();
    }
    const double one = seconds_of([&] { engine->step(batches); });
    if (i < 2) continue;
    seconds.push_back(one);
    if (!matmuls.empty()) alone.push_back(measure_matmuls_alone(matmuls, threads));
  }
  const Stats after = engine->stats();
  if (on_host || options.has("trace")) engine->write_trace(trace);
  const Summary step = summarize(seconds);
  const double update = (after.optimizer_seconds - before.optimizer_seconds) / steps;
  print_row("training step", step, tokens, compute.flops);
  fmt::print(
      "host update {:.4f} s per step; up {}, down {} per step\n", update,
      format_bytes((after.uploaded_bytes - before.uploaded_bytes) / static_cast<size_t>(steps)),
      format_bytes((after.offloaded_bytes - before.offloaded_bytes) / static_cast<size_t>(steps)));
  if (on_host) {
    if (!alone.empty()) print_ceilings(alone, seconds);
    print_operations(trace, steps, step.median);
    if (!options.has("trace")) std::filesystem::remove(trace);
  }
  if (!config.nvme.paths.empty()) print_swap_phase(*engine, batches, steps);
  if (only == "step") return;
  const double backward = compute.step.median - compute.forward.median;
  const double bound = backward + std::max(compute.forward.median, update);
  fmt::print("bound backward + max(forward, host update) {:.4f} s: step / bound {:.3f}\n", bound,
             step.median / bound);
  print_memory_bound(config, engine->plan().parameters, memory_rate, compute, step.median);
  fmt::print("compute-only / step {:.3f}\n", compute.step.median / step.median);
}

}  // namespace
}  // namespace orlop::bench

int main(int argc, char** argv) {
  try {
    orlop::bench::run(orlop::bench::parse_options(argc, argv));
    return 0;
  } catch (const orlop::Error& error) {
    fmt::print(stderr, "bench_step: {}\n", error.what());
    return orlop::exit_code(error.code());
  }
}
