// One training step of the engine, beside its ceiling: the same step's device work alone (weights
// resident, no update), measured in the same run.
//
//   bench_step --shape l3|l7|smollm2|DIR [--tokens 16384] [--sequence 2048] [--micro-batch 8]
//   [--steps 5]
//              [--device auto] [--device-mem 24GiB] [--precision bf16|fp32|fp16]
//              [--resident N] [--device-optimizer N] [--prefetch N] [--activations device|host]
//              [--clip 1.0] [--threads N] [--only step|compute] [--trace FILE]
//              [--nvme DIR[,DIR...]] [--nvme-optimizer N] [--nvme-params N] [--host-mem 8GiB]
//
// With --nvme the states of all blocks, or of the last N, are on drives, and it measures the update
// phase as well: from the moment the norm is known to the last swap_out, beside the time that the
// drives need to move the same bytes, half of them each way, with nothing else to do.
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
#include <fstream>
#include <map>
#include <numeric>
#include <random>
#include <sstream>
#include <string>

#include "base/bytes.h"
#include "base/check.h"
#include "bench/support/matmul_ceiling.h"
#include "bench/support/recording_backend.h"
#include "bench/support/samples.h"
#include "bench/support/swap_rig.h"
#include "bench/support/trace_times.h"
#include "engine/model_files.h"
#include "engine/ranks.h"
#include "engine/session.h"
#include "orlop/engine.h"

namespace orlop::bench {
namespace {

struct Options {
  std::map<std::string, std::string> values;

  std::string get(const std::string& name, const std::string& fallback) const {
    const auto found = values.find(name);
    return found == values.end() ? fallback : found->second;
  }
  int64_t number(const std::string& name, int64_t fallback) const {
    const auto found = values.find(name);
    return found == values.end() ? fallback : std::stoll(found->second);
  }
  bool has(const std::string& name) const { return values.contains(name); }
};

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    check(name.starts_with("--"), ErrorCode::kUsage, "'{}' is not an option", name);
    options.values[name.substr(2)] = argv[i + 1];
  }
  return options;
}

// config.json of a named shape; weights are random.
std::string shape_folder(const std::string& shape) {
  const std::map<std::string, std::string> shapes = {
      {"l3",
       R"("vocab_size":32000,"hidden_size":3072,"intermediate_size":8192,"num_hidden_layers":28,
              "num_attention_heads":24,"num_key_value_heads":8,"tie_word_embeddings":false)"},
      {"l7",
       R"("vocab_size":32000,"hidden_size":4096,"intermediate_size":11008,"num_hidden_layers":32,
              "num_attention_heads":32,"num_key_value_heads":32,"tie_word_embeddings":false)"},
      {"smollm2",
       R"("vocab_size":49152,"hidden_size":576,"intermediate_size":1536,"num_hidden_layers":30,
              "num_attention_heads":9,"num_key_value_heads":3,"tie_word_embeddings":true)"}};
  const auto found = shapes.find(shape);
  if (found == shapes.end()) return shape;
  const auto folder = std::filesystem::temp_directory_path() / ("orlop_shape_" + shape);
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "config.json")
      << "{\"model_type\":\"llama\",\"architectures\":[\"LlamaForCausalLM\"],\"hidden_act\":"
         "\"silu\","
         "\"max_position_embeddings\":8192,\"rms_norm_eps\":1e-5,\"rope_theta\":10000.0,"
      << found->second << "}\n";
  return folder.string();
}

EngineConfig make_config(const Options& options) {
  EngineConfig config;
  config.device = options.get("device", "auto");
  const std::string precision = options.get("precision", "bf16");
  config.precision = precision == "fp32"   ? Precision::kF32
                     : precision == "fp16" ? Precision::kF16
                                           : Precision::kBF16;
  config.batch.sequence_length = options.number("sequence", 2048);
  config.batch.micro_batch_size = options.number("micro-batch", 8);
  const int64_t micro_tokens = config.batch.sequence_length * config.batch.micro_batch_size;
  config.batch.accumulation_steps =
      std::max<int64_t>(1, options.number("tokens", 16384) / micro_tokens);
  config.threads = static_cast<int>(options.number("threads", 0));
  config.from_scratch = true;
  config.schedule.kind = ScheduleKind::kConstant;
  config.optimizer.learning_rate = 1e-5;
  config.optimizer.max_grad_norm = std::stod(options.get("clip", "1"));
  if (options.has("device-mem")) {
    config.limits.device_bytes = parse_bytes(options.get("device-mem", ""), "--device-mem");
  }
  if (options.has("host-mem")) {
    config.limits.host_bytes = parse_bytes(options.get("host-mem", ""), "--host-mem");
  }
  if (options.has("resident"))
    config.placement.resident_blocks = static_cast<int>(options.number("resident", 0));
  if (options.has("device-optimizer")) {
    config.placement.device_optimizer_blocks =
        static_cast<int>(options.number("device-optimizer", 0));
  }
  if (options.has("prefetch"))
    config.placement.prefetch_depth = static_cast<int>(options.number("prefetch", 1));
  if (options.has("activations")) {
    config.placement.activations_on_device = options.get("activations", "") == "device";
  }
  return config;
}

// Needs the number of FlatParams, which the plan without drives tells.
void set_drives(const Options& options, const std::string& model_dir, EngineConfig& config) {
  std::stringstream list(options.get("nvme", ""));
  for (std::string path; std::getline(list, path, ',');) config.nvme.paths.push_back(path);
  if (config.nvme.paths.empty()) return;
  const int blocks = Engine::plan(model_dir, config).blocks;
  config.placement.device_optimizer_blocks = 0;
  config.placement.nvme_optimizer_blocks =
      static_cast<int>(options.number("nvme-optimizer", blocks));
  config.placement.nvme_param_blocks = static_cast<int>(options.number("nvme-params", 0));
}

std::vector<MicroBatch> random_batches(const EngineConfig& config, int64_t vocab_size) {
  std::mt19937 random(1);
  std::uniform_int_distribution<int32_t> token(0, static_cast<int32_t>(vocab_size) - 1);
  std::vector<MicroBatch> batches(static_cast<size_t>(config.batch.accumulation_steps));
  for (MicroBatch& batch : batches) {
    batch.tokens.resize(
        static_cast<size_t>(config.batch.micro_batch_size * config.batch.sequence_length));
    for (int32_t& id : batch.tokens) id = token(random);
    batch.labels.assign(batch.tokens.begin() + 1, batch.tokens.end());
    batch.labels.push_back(kIgnoredLabel);
  }
  return batches;
}

void print_row(const char* what, const Summary& seconds, double tokens, double flops) {
  fmt::print("{:44} {:8.4f} s (spread {:4.1f} %) {:9.0f} tok/s {:7.1f} TFLOP/s\n", what,
             seconds.median, 100 * seconds.spread(), tokens / seconds.median,
             flops / seconds.median / 1e12);
}

struct ComputeTimes {
  Summary step;     // forward and backward
  Summary forward;  // of every micro-batch
};

// The step's device work with resident weights, and its forward alone.
ComputeTimes measure_compute(const std::string& model_dir, EngineConfig config, int steps,
                             double& flops) {
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
  flops = 0;
  for (const double block : session.input().forward_flops) flops += 3 * block;
  flops *= static_cast<double>(batches.size());
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
  return {summarize(step), summarize(forward)};
}

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

// Update phases and the drives alone by turns.
void print_swap_phase(Engine& engine, const std::vector<MicroBatch>& batches, int steps) {
  const NvmeConfig& nvme = engine.config().nvme;
  SwapRigOptions options;
  for (const std::string& path : nvme.paths) {  // each engine wants folders of its own
    options.directories.push_back(path + "/drives_alone");
    std::filesystem::create_directories(options.directories.back());
  }
  options.bytes = size_t{1} << 30;
  options.chunk_bytes = size_t{32} << 20;
  options.queue.block_bytes = nvme.block_bytes;
  options.queue.depth = static_cast<unsigned>(nvme.queue_depth);
  options.direct = nvme.direct;
  SwapRig rig(options);
  std::vector<double> phases;
  std::vector<double> ratios;
  std::vector<double> rates;
  engine.synchronize();
  const Stats before = engine.stats();
  for (int i = 0; i < steps; ++i) {
    const Stats start = engine.stats();
    engine.step(batches);
    const double waited = seconds_of([&] { engine.synchronize(); });
    const Stats end = engine.stats();
    // On a host of few cores the step itself waits for the update.
    phases.push_back(waited + end.optimizer_exposed_seconds - start.optimizer_exposed_seconds);
    const double bytes = static_cast<double>(end.nvme_read_bytes + end.nvme_written_bytes -
                                             start.nvme_read_bytes - start.nvme_written_bytes);
    rates.push_back(rig.run(Pattern::kMixed).gb_per_s);
    ratios.push_back(bytes * 1e-9 / rates.back() / phases.back());
  }
  const Stats after = engine.stats();
  const Summary phase = summarize(phases);
  const Summary ratio = summarize(ratios);
  const auto per_step = [steps](uint64_t bytes) {
    return format_bytes(bytes / static_cast<uint64_t>(steps));
  };
  fmt::print(
      "update phase {:.4f} s (spread {:.1f} %): read {}, written {}, host update {:.4f} s; the "
      "drives alone {:.2f} GB/s mixed, their bound is {:.3f} of the phase next to it ({:.3f} to "
      "{:.3f})\n",
      phase.median, 100 * phase.spread(), per_step(after.nvme_read_bytes - before.nvme_read_bytes),
      per_step(after.nvme_written_bytes - before.nvme_written_bytes),
      (after.optimizer_seconds - before.optimizer_seconds) / steps, summarize(rates).median,
      ratio.median, ratio.min, ratio.max);
}

void run(const Options& options) {
  const std::string model_dir = shape_folder(options.get("shape", "smollm2"));
  EngineConfig config = make_config(options);
  set_drives(options, model_dir, config);
  const int steps = static_cast<int>(options.number("steps", 5));
  const std::string only = options.get("only", "both");
  const double tokens =
      static_cast<double>(config.batch.accumulation_steps * config.batch.micro_batch_size *
                          config.batch.sequence_length);
  double flops = 0;
  ComputeTimes compute;
  if (only != "step") {
    compute = measure_compute(model_dir, config, steps, flops);
    print_row("forward + backward, weights resident", compute.step, tokens, flops);
    print_row("  of it forward", compute.forward, tokens, flops / 3);
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
  print_row("training step", step, tokens, flops);
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
  fmt::print(
      "bound backward + max(forward, host update) {:.4f} s: step / bound {:.3f}; compute-only / "
      "step "
      "{:.3f}\n",
      bound, step.median / bound, compute.step.median / step.median);
}

}  // namespace
}  // namespace orlop::bench

int main(int argc, char** argv) {
  try {
    orlop::bench::run(orlop::bench::parse(argc, argv));
    return 0;
  } catch (const orlop::Error& error) {
    fmt::print(stderr, "bench_step: {}\n", error.what());
    return orlop::exit_code(error.code());
  }
}
