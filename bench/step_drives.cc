#include "bench/step_drives.h"

#include <fmt/format.h>

#include <filesystem>
#include <sstream>

#include "base/bytes.h"
#include "bench/support/swap_rig.h"

namespace orlop::bench {

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

}  // namespace orlop::bench
