#include "bench/step_copies.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <memory>
#include <vector>

#include "base/bytes.h"
#include "bench/step_setup.h"
#include "bench/support/samples.h"
#include "bench/support/trace_times.h"
#include "engine/backend_factory.h"
#include "memory/host_arena.h"
#include "orlop/engine.h"

namespace orlop::bench {
namespace {

constexpr size_t kCopyBytes = size_t{512} << 20;
constexpr double kGiga = 1e9;

// GB/s of large copies between pinned memory and the device.
struct CopyRates {
  Summary up;         // alone
  Summary down;       // alone
  Summary up_both;    // while the other direction is busy too
  Summary down_both;  // likewise
};

CopyRates measure_copy_rates(const EngineConfig& config, int repeats) {
  const BackendChoice choice = make_backend(config, 1, 1, nullptr);
  const size_t bytes =
      std::min(kCopyBytes, choice.backend->info().free_bytes / 4) / kPageBytes * kPageBytes;
  HostArena host(2 * bytes);
  if (!choice.backend->info().is_host) {
    host.register_with(
        [&](void* address, size_t size) { choice.backend->register_host_memory(address, size); });
  }
  auto* device = static_cast<std::byte*>(choice.backend->allocate_arena(2 * bytes));
  Queue& up = choice.backend->queue(QueueKind::kUpload);
  Queue& down = choice.backend->queue(QueueKind::kOffload);
  const auto upload = [&] { up.upload(device, host.data(), bytes); };
  const auto offload = [&] { down.offload(host.data() + bytes, device + bytes, bytes); };
  const double size = static_cast<double>(bytes) / kGiga;
  std::vector<double> rates[4];
  for (int i = 0; i < repeats + 1; ++i) {
    const double alone_up = seconds_of([&] { upload(), up.synchronize(); });
    const double alone_down = seconds_of([&] { offload(), down.synchronize(); });
    // The other direction has more to do than the one whose time counts.
    const auto beside = [&](const auto& timed, Queue& queue, const auto& other) {
      other();
      const double seconds = seconds_of([&] { timed(), queue.synchronize(); });
      choice.backend->synchronize();
      return seconds;
    };
    const double both_up = beside(upload, up, [&] { offload(), offload(); });
    const double both_down = beside(offload, down, [&] { upload(), upload(); });
    if (i == 0) continue;  // touches the memory
    int k = 0;
    for (const double seconds : {alone_up, alone_down, both_up, both_down})
      rates[k++].push_back(size / seconds);
  }
  return {summarize(rates[0]), summarize(rates[1]), summarize(rates[2]), summarize(rates[3])};
}

void print_beside(const char* what, size_t bytes, const std::vector<double>& seconds,
                  const char* bound, const Summary& rate) {
  const Summary time = summarize(seconds);
  const double reached = static_cast<double>(bytes) / kGiga / time.median;
  fmt::print("{}: {} in {:.4f} s (spread {:.1f} %), {:.1f} GB/s, {:.3f} of {}\n", what,
             format_bytes(bytes), time.median, 100 * time.spread(), reached, reached / rate.median,
             bound);
}

}  // namespace

void measure_copies(const std::string& model_dir, EngineConfig config, int repeats) {
  config.batch.micro_batch_size = 1;
  config.batch.accumulation_steps = 1;
  config.placement.resident_blocks = 0;
  config.placement.device_optimizer_blocks = 0;
  const CopyRates rates = measure_copy_rates(config, std::max(repeats, 3));
  fmt::print(
      "pinned copies of {}: up {:.1f}, down {:.1f} GB/s alone; both at once up {:.1f}, down "
      "{:.1f}\n",
      format_bytes(kCopyBytes), rates.up.median, rates.down.median, rates.up_both.median,
      rates.down_both.median);

  const std::unique_ptr<Engine> engine = Engine::open(model_dir, config);
  fmt::print("{}", engine->plan().to_text());
  const std::vector<MicroBatch> batches = random_batches(config, 32000);
  const std::string trace =
      (std::filesystem::temp_directory_path() / fmt::format("orlop_copies_{}.json", ::getpid()))
          .string();
  std::vector<double> evaluations;
  std::vector<double> backwards;
  size_t up = 0;
  size_t down = 0;
  for (int i = 0; i < repeats + 1; ++i) {
    engine->start_trace();
    const Stats before = engine->stats();
    engine->step(batches);
    engine->synchronize();
    const Stats between = engine->stats();
    engine->write_trace(trace);
    const double evaluation = seconds_of([&] { engine->evaluate(batches); });
    if (i == 0) continue;
    down = between.offloaded_bytes - before.offloaded_bytes;
    up = engine->stats().uploaded_bytes - between.uploaded_bytes;
    backwards.push_back(lane_seconds(trace, "offload"));
    evaluations.push_back(evaluation);
  }
  std::filesystem::remove(trace);
  print_beside("evaluation, weights up", up, evaluations, "uploads alone", rates.up);
  print_beside("backward, gradients down", down, backwards, "copies both ways at once",
               rates.down_both);
}

}  // namespace orlop::bench
