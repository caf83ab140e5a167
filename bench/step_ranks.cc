#include "bench/step_ranks.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <sstream>

#include "base/bytes.h"
#include "base/check.h"
#include "bench/step_compute.h"
#include "bench/support/memory_ceiling.h"
#include "bench/support/rank_waits.h"
#include "bench/support/trace_times.h"
#include "comm/thread_communicator.h"
#include "cpu_adam/cpu_features.h"
#include "engine/backend_factory.h"
#include "engine/open_engine.h"
#include "engine/ranks.h"
#include "formats/hf_config.h"
#include "model/param_layout.h"

namespace orlop::bench {
namespace {

constexpr int kWarmUpSteps = 2;
constexpr int kTracedSteps = 2;

struct Work {
  std::string model_dir;
  EngineConfig config;  // of the largest step
  int ranks = 1;
  int steps = 1;
  std::vector<int64_t> micro_batches;  // per rank and step, one entry per measurement
  int64_t vocab = 0;
  int params = 0;  // FlatParams
  int64_t numel = 0;

  double micro_tokens() const {
    return static_cast<double>(config.batch.micro_batch_size * config.batch.sequence_length);
  }
};

// One rank's measurement of steps with one number of micro-batches.
struct RankTimes {
  std::vector<double> seconds;   // of every step
  double update_seconds = 0;     // host update, per step
  double link_bytes = 0;         // up and down, per step
  std::vector<TraceSpan> trace;  // of the traced steps
  double traced_seconds = 0;
  RankWaits waits;  // in them
  Stats stats;
};

class Part {
 public:
  Part(const Work& work, bool states_on_device) : work_(work), on_device_(states_on_device) {
    results_.assign(work.micro_batches.size(),
                    std::vector<RankTimes>(static_cast<size_t>(work.ranks)));
  }

  void run() {
    const double seconds = seconds_of([&] {
      run_ranks(work_.ranks, issue_on_host_queue, [&](Communicator& host) { run_rank(host); });
    });
    fmt::print("(part took {:.1f} s, of it {:.1f} s until the first step)\n", seconds,
               opened_seconds_);
    for (std::vector<RankTimes>& ranks : results_) match(ranks);
  }

  const std::vector<RankTimes>& results(size_t measurement) const { return results_[measurement]; }

 private:
  void run_rank(Communicator& host) {
    EngineConfig config = work_.config;
    std::shared_ptr<Communicator> ranks(std::shared_ptr<void>(), &host);
    if (config.device != "host") {
      ranks = make_gpu_communicator(host.rank(), ranks);
      config.device = fmt::format("cuda:{}", host.rank());
    }
    config.placement.device_optimizer_blocks = on_device_ ? work_.params : 0;
    std::unique_ptr<Engine> engine;
    const double opened = seconds_of([&] { engine = open_engine(work_.model_dir, config, ranks); });
    host.barrier("opened");
    if (host.rank() == 0) {
      opened_seconds_ = opened;
      fmt::print("{}", engine->plan().to_text());
    }
    for (size_t i = 0; i < work_.micro_batches.size(); ++i) measure(*engine, host, i);
  }

  void measure(Engine& engine, Communicator& host, size_t measurement) {
    const auto micro_batches = static_cast<size_t>(work_.micro_batches[measurement]);
    const auto rank = static_cast<size_t>(host.rank());
    RankTimes& times = results_[measurement][rank];
    std::vector<MicroBatch> batches =
        random_batches(work_.config, work_.vocab, 1 + static_cast<uint32_t>(rank));
    batches.resize(micro_batches);
    for (int i = 0; i < kWarmUpSteps; ++i) engine.step(batches);
    host.barrier("warm");
    const Stats before = engine.stats();
    for (int i = 0; i < work_.steps; ++i) {
      times.seconds.push_back(seconds_of([&] { engine.step(batches); }));
    }
    times.stats = engine.stats();
    const double steps = work_.steps;
    times.update_seconds = (times.stats.optimizer_seconds - before.optimizer_seconds) / steps;
    times.link_bytes = static_cast<double>(times.stats.uploaded_bytes - before.uploaded_bytes +
                                           times.stats.offloaded_bytes - before.offloaded_bytes) /
                       steps;
    trace(engine, batches, host.rank(), times);
  }

  void trace(Engine& engine, std::span<const MicroBatch> batches, int rank, RankTimes& times) {
    const auto path = (std::filesystem::temp_directory_path() /
                       fmt::format("orlop_bench_ranks_{}_{}.json", ::getpid(), rank))
                          .string();
    engine.start_trace();
    for (int i = 0; i < kTracedSteps; ++i) {
      times.traced_seconds += seconds_of([&] { engine.step(batches); });
    }
    engine.write_trace(path);
    times.trace = read_trace(path);
    std::filesystem::remove(path);
  }

  static void match(std::vector<RankTimes>& ranks) {
    std::vector<std::vector<TraceSpan>> traces;
    for (RankTimes& rank : ranks) traces.push_back(std::move(rank.trace));
    const std::vector<RankWaits> waits = rank_waits(traces);
    for (size_t rank = 0; rank < ranks.size(); ++rank) ranks[rank].waits = waits[rank];
  }

  const Work& work_;
  const bool on_device_;
  double opened_seconds_ = 0;
  std::vector<std::vector<RankTimes>> results_;  // [measurement][rank]
};

// What all ranks of one part did in one measurement.
struct PartTimes {
  Summary step;  // the slowest rank's
  double tokens = 0;
  double exposed_share = 0;  // of a traced step, the largest of the ranks
  double others_share = 0;   // likewise
};

PartTimes summarize_ranks(const Work& work, const std::vector<RankTimes>& ranks,
                          int64_t micro_batches) {
  PartTimes times;
  std::vector<double> slowest(ranks.front().seconds);
  for (const RankTimes& rank : ranks) {
    for (size_t i = 0; i < slowest.size(); ++i) {
      slowest[i] = std::max(slowest[i], rank.seconds[i]);
    }
    const auto share = [&](double seconds) { return seconds / rank.traced_seconds; };
    times.exposed_share = std::max(times.exposed_share, share(rank.waits.exposed_seconds));
    times.others_share = std::max(times.others_share, share(rank.waits.others_seconds()));
  }
  times.step = summarize(slowest);
  times.tokens = static_cast<double>(micro_batches) * work.micro_tokens() * work.ranks;
  return times;
}

// "12.3 % (update 10.0, upload 2.3)"
std::string shares(const WaitCauses& causes, double sum, double whole) {
  std::vector<std::string> parts;
  for (const auto& [cause, seconds] : causes) {
    parts.push_back(fmt::format("{} {:.1f}", cause, 100 * seconds / whole));
  }
  return fmt::format("{:.1f} %{}", 100 * sum / whole,
                     parts.empty() ? "" : fmt::format(" ({})", fmt::join(parts, ", ")));
}

// Shares of a traced step in which the compute queue of each rank works, and waits for what.
void print_waits(const std::vector<RankTimes>& ranks) {
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const RankTimes& own = ranks[rank];
    const RankWaits& waits = own.waits;
    const double whole = own.traced_seconds;
    fmt::print(
        "    rank {}: compute works {:.1f} %, waits for its own rank {}, for other ranks {}; "
        "exposed communication {:.2f} %; device {}, host {}\n",
        rank, 100 * waits.compute_seconds / whole, shares(waits.own, waits.own_seconds(), whole),
        shares(waits.others, waits.others_seconds(), whole), 100 * waits.exposed_seconds / whole,
        format_bytes(own.stats.device_peak_bytes), format_bytes(own.stats.host_bytes));
  }
}

void print_part(const Work& work, const Part& part, const std::vector<ComputeTimes>& compute,
                bool on_device, double dram_bytes_per_s) {
  for (size_t i = 0; i < work.micro_batches.size(); ++i) {
    const std::vector<RankTimes>& ranks = part.results(i);
    const PartTimes times = summarize_ranks(work, ranks, work.micro_batches[i]);
    const double rate = times.tokens / times.step.median;
    const double tokens_per_rank = times.tokens / work.ranks;
    const double alone = tokens_per_rank / compute[i].step.median;
    print_row(fmt::format("{} ranks, {:.0f} tokens each, optimizer in {}", work.ranks,
                          tokens_per_rank, on_device ? "device memory" : "host memory")
                  .c_str(),
              times.step, times.tokens, compute[i].flops * work.ranks);
    fmt::print(
        "    {:.0f} tok/s per rank; {:.3f} x one device's compute-only rate, efficiency {:.3f}; "
        "exposed communication at most {:.2f} % of a step, waits for other ranks {:.1f} %\n",
        rate / work.ranks, rate / alone, rate / alone / work.ranks, 100 * times.exposed_share,
        100 * times.others_share);
    print_waits(ranks);
    double link_bytes = 0;
    double update_seconds = 0;
    for (const RankTimes& rank : ranks) {
      link_bytes += rank.link_bytes;
      update_seconds = std::max(update_seconds, rank.update_seconds);
    }
    const double bytes =
        on_device ? 0 : static_cast<double>(work.numel) * update_bytes(work.config);
    const double least = (bytes + link_bytes) / dram_bytes_per_s;
    fmt::print(
        "    host DRAM per step: update {} (longest {:.3f} s of a rank), links {}; at {:.1f} GB/s "
        "measured here {:.3f} s, {:.1f} % of the step\n",
        format_bytes(static_cast<size_t>(bytes)), update_seconds,
        format_bytes(static_cast<size_t>(link_bytes)), dram_bytes_per_s / 1e9, least,
        100 * least / times.step.median);
  }
}

Work make_work(const Options& options) {
  Work work;
  std::vector<int64_t> tokens;
  std::stringstream list(options.get("tokens", "16384,65536"));
  for (std::string one; std::getline(list, one, ',');) tokens.push_back(std::stoll(one));
  check(!tokens.empty(), ErrorCode::kUsage, "--tokens is empty");
  work.model_dir = shape_folder(options.get("shape", "l7"));
  work.config = make_config(options, *std::max_element(tokens.begin(), tokens.end()));
  work.ranks = static_cast<int>(options.number("gpus", 1));
  work.steps = static_cast<int>(options.number("steps", 3));
  check(work.ranks >= 1 && work.steps >= 1, ErrorCode::kUsage,
        "--gpus is {}, --steps {}; both must be at least 1", work.ranks, work.steps);
  if (work.config.device == "auto") work.config.device = usable_gpus() > 0 ? "cuda" : "host";
  check(work.config.device == "host" || work.ranks <= usable_gpus(), ErrorCode::kUsage,
        "--gpus is {}, but {} GPUs can be used; --device host runs the ranks in host memory",
        work.ranks, usable_gpus());
  for (const int64_t count : tokens) {
    work.micro_batches.push_back(
        std::max<int64_t>(1, count / static_cast<int64_t>(work.micro_tokens())));
  }
  const TransformerConfig model = make_transformer_config(read_hf_config(work.model_dir));
  const ModelLayout layout = make_layout(model);
  work.vocab = model.vocab_size;
  work.params = static_cast<int>(layout.flat_params.size());
  work.numel = layout.numel();
  return work;
}

}  // namespace

void run_on_ranks(const Options& options) {
  const Work work = make_work(options);
  const std::string only = options.get("part", "all");
  const double dram = measure_memory_bytes_per_s(default_threads());
  std::vector<ComputeTimes> compute;
  const double seconds = seconds_of([&] {
    compute = measure_compute(work.model_dir, work.config, work.steps, work.micro_batches);
  });
  fmt::print("(part took {:.1f} s)\n", seconds);
  for (size_t i = 0; i < compute.size(); ++i) {
    const double tokens = static_cast<double>(work.micro_batches[i]) * work.micro_tokens();
    print_row(fmt::format("one device, {:.0f} tokens, compute alone", tokens).c_str(),
              compute[i].step, tokens, compute[i].flops);
  }
  for (const bool on_device : {true, false}) {
    if (only == (on_device ? "host" : "device")) continue;
    Part part(work, on_device);
    part.run();
    print_part(work, part, compute, on_device, dram);
    std::fflush(stdout);
  }
}

}  // namespace orlop::bench
