// A process that tests run, kill and measure.
//   train_worker train MODEL RUN_DIR [SWAP_DIR]      trains without end, saves after every step;
//                                                    with all states in SWAP_DIR
//   train_worker train-on MODEL RUN_DIR [SWAP_DIR]   likewise, saving in the background
//   train_worker swap MODEL SWAP_DIR ENGINE          trains four steps with all states on a drive,
//                                                    moved by ENGINE; prints every loss, or "error"
//                                                    and what it says
//   train_worker memory MODEL RUN_DIR DEVICE_BLOCKS CLIP
//                                                    trains two steps, from random weights where
//                                                    the folder holds none, with so many blocks'
//                                                    optimizer on the device (-1: all states in a
//                                                    swap directory), clipped
//                                                    to CLIP, saves and loads; prints "peak", its
//                                                    peak resident bytes, the plan's
//   train_worker memory-tight MODEL RUN_DIR SHARE CLIP
//                                                    the same with the least device memory and host
//                                                    memory of SHARE of the states, the rest in a
//                                                    swap directory
//   train_worker memory-eval MODEL RUN_DIR DEVICE_BLOCKS
//                                                    opens the weights of MODEL to evaluate only,
//                                                    those of so many blocks on the device alone,
//                                                    and evaluates twice; prints as memory does
//   train_worker memory-ranks MODEL RANKS WIRE       opens the weights of MODEL on so many threads
//                                                    that are ranks, and trains two steps with
//                                                    gradients that travel as fp32 or bf16; prints
//                                                    "peak", its peak resident bytes, the plans',
//                                                    and the bytes that it read from files

#include <sys/prctl.h>

#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <string_view>

#include "formats/safetensors.h"
#include "orlop/engine.h"
#include "tests/support/engine_run.h"
#include "tests/support/process.h"
#include "tests/support/rank_run.h"

namespace orlop::test {
namespace {

void train(const std::string& model, const std::string& run_dir, SaveMode mode,
           const std::string& swap_dir) {
  EngineConfig config = tiny_engine_config(Precision::kBF16);
  config.placement.wave = 2;
  if (swap_dir.empty()) {
    config.placement.device_optimizer_blocks = 1;
  } else {
    config.nvme.paths = {swap_dir};
    config.placement.nvme_optimizer_blocks = 5;
    config.placement.nvme_param_blocks = 3;
    config.placement.swap_chunk = 4096;
  }
  const auto engine = Engine::open(model, config);
  for (int64_t step = 1;; ++step) {
    std::cout << "step " << step << std::endl;
    engine->step(batches_of_step(config, 61, step));
    std::cout << "save " << step << std::endl;
    engine->save_checkpoint(run_dir, std::to_string(step), 2, mode);
  }
}

void train_on_a_drive(const std::string& model, const std::string& swap_dir,
                      const std::string& io_engine) {
  EngineConfig config = tiny_engine_config(Precision::kBF16);
  config.nvme.paths = {swap_dir};
  config.nvme.engine = io_engine;
  config.nvme.direct = false;  // transfers of any length
  config.placement.nvme_optimizer_blocks = 5;
  config.placement.nvme_param_blocks = 3;
  config.placement.swap_chunk = 4096;
  try {
    const auto engine = Engine::open(model, config);
    for (int64_t step = 1; step <= 4; ++step) {
      const StepResult result = engine->step(batches_of_step(config, 61, step));
      engine->synchronize();
      std::cout << "loss " << std::hexfloat << result.loss << std::endl;
    }
  } catch (const Error& error) {
    std::cout << "error " << error.what() << std::endl;
  }
}

void print_peak(const Engine& engine) {
  std::cout << "peak " << peak_resident_bytes() << ' '
            << engine.plan().host_bytes + engine.plan().device_peak_bytes << std::endl;
}

void run_and_print_peak(const std::string& model, const std::string& run_dir,
                        const EngineConfig& config) {
  const auto engine = Engine::open(model, config);
  for (int64_t step = 1; step <= 2; ++step) engine->step(batches_of_step(config, 61, step));
  engine->save_checkpoint(run_dir, "", 1);
  engine->load_checkpoint(Engine::latest_checkpoint(run_dir));
  print_peak(*engine);
}

EngineConfig memory_config(const std::string& model) {
  EngineConfig config = tiny_engine_config(Precision::kBF16);
  config.from_scratch = !std::filesystem::exists(model + "/" + kSafetensorsFileName) &&
                        !std::filesystem::exists(model + "/" + kSafetensorsIndexName);
  return config;
}

void measure_memory(const std::string& model, const std::string& run_dir, int device_blocks,
                    double clip) {
  EngineConfig config = memory_config(model);
  if (device_blocks >= 0) {
    config.placement.device_optimizer_blocks = device_blocks;
  } else {
    config.nvme.paths = {run_dir + "/swap"};
    config.placement.nvme_optimizer_blocks = 5;
    config.placement.nvme_param_blocks = 5;
    if (device_blocks < -1) config.placement.activations = Tier::kNvme;
  }
  config.optimizer.max_grad_norm = clip;
  run_and_print_peak(model, run_dir, config);
}

void measure_memory_of_evaluation(const std::string& model, int device_blocks) {
  EngineConfig config = memory_config(model);
  config.evaluate_only = true;
  config.placement.resident_blocks = 0;
  config.placement.device_optimizer_blocks = device_blocks;
  const auto engine = Engine::open(model, config);
  for (int64_t step = 1; step <= 2; ++step) engine->evaluate(batches_of_step(config, 61, step));
  print_peak(*engine);
}

void measure_tight_memory(const std::string& model, const std::string& run_dir, double share,
                          double clip) {
  EngineConfig config = memory_config(model);
  config.optimizer.max_grad_norm = clip;
  EngineConfig least = config;
  least.placement.resident_blocks = 0;
  least.placement.device_optimizer_blocks = 0;
  least.placement.activations = Tier::kHost;
  least.placement.prefetch_depth = 0;
  const PlanReport plan = Engine::plan(model, least);
  config.limits.device_bytes = plan.device_peak_bytes;
  config.limits.host_bytes = static_cast<size_t>(share * static_cast<double>(plan.state_bytes));
  config.nvme.paths = {run_dir + "/swap"};
  run_and_print_peak(model, run_dir, config);
}

// By this process in all, the page cache included.
uint64_t bytes_read() {
  std::ifstream io("/proc/self/io");
  std::string name;
  uint64_t bytes = 0;
  io >> name >> bytes;
  return bytes;
}

void measure_memory_of_ranks(const std::string& model, int ranks, std::string_view wire) {
  EngineConfig config = memory_config(model);
  config.gradient_wire = wire == "bf16" ? DType::kBF16 : DType::kF32;
  config.placement.resident_blocks = config.placement.device_optimizer_blocks = 0;
  const PlanReport plan = Engine::plan(model, config, ranks);
  const uint64_t before = bytes_read();
  uint64_t read = 0;
  run_engines(ranks, model, config, [&](Engine& engine) {
    if (engine.rank() == 0) read = bytes_read() - before;  // all have opened when one has
    for (int64_t step = 1; step <= 2; ++step) engine.step(batches_of_step(config, 61, step));
  });
  std::cout << "peak " << peak_resident_bytes() << ' '
            << static_cast<size_t>(ranks) * (plan.host_bytes + plan.device_peak_bytes) << ' '
            << read << std::endl;
}

}  // namespace
}  // namespace orlop::test

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  // Whether a mapping that is used in part holds a huge page is a matter of its address.
  if (mode.starts_with("memory")) prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
  try {
    if ((mode == "train" || mode == "train-on") && (argc == 4 || argc == 5)) {
      orlop::test::train(argv[2], argv[3],
                         mode == "train" ? orlop::SaveMode::kWait : orlop::SaveMode::kBackground,
                         argc == 5 ? argv[4] : "");
    } else if (mode == "swap" && argc == 5) {
      orlop::test::train_on_a_drive(argv[2], argv[3], argv[4]);
    } else if (mode == "memory" && argc == 6) {
      orlop::test::measure_memory(argv[2], argv[3], std::atoi(argv[4]), std::atof(argv[5]));
    } else if (mode == "memory-tight" && argc == 6) {
      orlop::test::measure_tight_memory(argv[2], argv[3], std::atof(argv[4]), std::atof(argv[5]));
    } else if (mode == "memory-eval" && argc == 5) {
      orlop::test::measure_memory_of_evaluation(argv[2], std::atoi(argv[4]));
    } else if (mode == "memory-ranks" && argc == 5) {
      orlop::test::measure_memory_of_ranks(argv[2], std::atoi(argv[3]), argv[4]);
    } else {
      std::cerr << "usage: train_worker train|train-on MODEL RUN_DIR [SWAP_DIR] | swap MODEL "
                   "SWAP_DIR ENGINE | memory MODEL RUN_DIR "
                   "DEVICE_BLOCKS CLIP | memory-eval MODEL RUN_DIR DEVICE_BLOCKS | memory-tight "
                   "MODEL RUN_DIR SHARE CLIP | memory-ranks MODEL RANKS WIRE\n";
      return 2;
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
  return 0;
}
