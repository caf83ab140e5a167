// What a plan promises about memory, and what an engine leaves behind.

#include <gtest/gtest.h>
#include <malloc.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "orlop/engine.h"
#include "tests/formats/support.h"
#include "tests/support/engine_run.h"
#include "tests/support/process.h"
#include "tests/support/tiny_model.h"

namespace orlop::test {
namespace {

struct RunKind {
  // Whose optimizer states live on the device; -1: they, and the weights, live on a drive; -2: so
  // do block inputs.
  int device_blocks;
  double clip;
  bool has_weights = false;  // read from a file, which streams: no second copy of a tensor
};

std::ostream& operator<<(std::ostream& out, const RunKind& kind) {
  return out << kind.device_blocks << " blocks on the device, clip " << kind.clip
             << (kind.has_weights ? ", weights from a file" : "");
}

struct MeasuredPeak {
  double peak = 0;
  double planned = 0;
};

// Peak resident bytes of a process that opens the model, trains two steps, saves and loads.
MeasuredPeak measure(const std::string& mode, const std::string& model,
                     const std::vector<std::string>& how) {
  std::vector<std::string> command = {ORLOP_TRAIN_WORKER, mode, model, model + "/run"};
  command.insert(command.end(), how.begin(), how.end());
  ChildProcess worker(command);
  const std::string line = worker.read_line().value_or("");
  EXPECT_EQ(worker.wait(), 0);
  MeasuredPeak measured;
  std::string word;
  std::istringstream(line) >> word >> measured.peak >> measured.planned;
  EXPECT_EQ(word, "peak") << line;
  return measured;
}

class PlannedMemory : public ::testing::TestWithParam<RunKind> {};

TEST_P(PlannedMemory, IsWhatTheRunTakes) {
  if (kSanitized) GTEST_SKIP() << "sanitizers take memory of their own";
  const TempFolder folder;
  TinyShape shape;
  shape.hidden = 640;
  shape.intermediate = 1408;
  shape.heads = 8;
  shape.vocab = 3000;
  std::filesystem::create_directory(folder / "large");
  std::filesystem::create_directory(folder / "tiny");
  if (GetParam().has_weights) {
    write_tiny_model(folder / "large", TinyFamily::kLlama, shape);
    write_tiny_model(folder / "tiny", TinyFamily::kLlama);
  } else {
    spill(folder / "large" / "config.json", tiny_config(TinyFamily::kLlama, shape));
    spill(folder / "tiny" / "config.json", tiny_config(TinyFamily::kLlama));
  }
  const std::vector<std::string> how = {std::to_string(GetParam().device_blocks),
                                        std::to_string(GetParam().clip)};
  const MeasuredPeak large = measure("memory", (folder / "large").string(), how);
  const MeasuredPeak tiny = measure("memory", (folder / "tiny").string(), how);
  const double taken = large.peak - tiny.peak;
  RecordProperty("planned_mib", std::to_string(large.planned / 1048576));
  RecordProperty("taken_mib", std::to_string(taken / 1048576));
  EXPECT_GT(large.planned, GetParam().device_blocks < 0 ? 100e6 : 200e6);
  EXPECT_NEAR(taken, large.planned, 0.05 * large.planned);
}

// Optimizer states in host memory, all of them on the device, and on a drive, with block inputs or
// without.
INSTANTIATE_TEST_SUITE_P(, PlannedMemory,
                         ::testing::Values(RunKind{0, 1}, RunKind{5, 1}, RunKind{0, 0},
                                           RunKind{5, 0}, RunKind{2, 1, true}, RunKind{-1, 1},
                                           RunKind{-1, 0}, RunKind{-2, 1}));

// As SmolLM2-135M, where the tied embedding is a fifth of all parameters.
TinyShape smollm2_shape() {
  TinyShape shape;
  shape.vocab = 49152;
  shape.hidden = 576;
  shape.intermediate = 1536;
  shape.layers = 30;
  shape.heads = 9;
  shape.kv_heads = 3;
  shape.positions = 512;
  return shape;
}

TEST(PlannedMemoryOnDrives, IsWhatTheModelOfTheDemoTakesWithAQuarterOfItsStatesInHostMemory) {
  if (kSanitized) GTEST_SKIP() << "sanitizers take memory of their own";
  const TempFolder folder;
  std::filesystem::create_directory(folder / "demo");
  std::filesystem::create_directory(folder / "tiny");
  spill(folder / "demo" / "config.json", tiny_config(TinyFamily::kLlamaTied, smollm2_shape()));
  spill(folder / "tiny" / "config.json", tiny_config(TinyFamily::kLlamaTied));
  const MeasuredPeak demo = measure("memory-tight", (folder / "demo").string(), {"0.25"});
  const MeasuredPeak tiny = measure("memory", (folder / "tiny").string(), {"-1", "1"});
  const double taken = demo.peak - tiny.peak;
  RecordProperty("planned_mib", std::to_string(demo.planned / 1048576));
  RecordProperty("taken_mib", std::to_string(taken / 1048576));
  EXPECT_NEAR(taken, demo.planned, 0.05 * demo.planned);
}

// Host bytes per parameter of a bf16 run with fp32 moments, without the planned activations.
double host_bytes_per_parameter(const std::string& model, double clip, int64_t micro_batches) {
  EngineConfig config;
  config.device = "host";
  config.optimizer.max_grad_norm = clip;
  config.batch = {
      .micro_batch_size = 2, .sequence_length = 512, .accumulation_steps = micro_batches};
  config.limits.device_bytes = size_t{1} << 40;
  config.limits.host_bytes = size_t{1} << 40;
  config.placement.resident_blocks = 0;
  config.placement.activations = Tier::kHost;
  const PlanReport plan = Engine::plan(model, config);
  auto bytes = static_cast<double>(plan.host_bytes);
  for (const PlanLine& line : plan.lines) {
    if (line.tier == Tier::kHost && line.purpose == "block inputs")
      bytes -= static_cast<double>(line.bytes);
  }
  return bytes / static_cast<double>(plan.parameters);
}

TEST(PlannedHostMemory, TakesTheStatesAndGradientsOnlyWhereTheyWaitForTheNorm) {
  const TempFolder folder;
  const TinyShape small = smollm2_shape();
  TinyShape large = small;  // as Llama 2 7B
  large.vocab = 32000;
  large.hidden = 4096;
  large.intermediate = 11008;
  large.layers = large.heads = large.kv_heads = 32;
  for (const auto& [name, family, shape] :
       {std::tuple("small", TinyFamily::kLlamaTied, small), {"large", TinyFamily::kLlama, large}}) {
    std::filesystem::create_directory(folder / name);
    spill(folder / name / "config.json", tiny_config(family, shape));
    for (const int64_t micro_batches : {1, 4}) {
      const std::string model = (folder / name).string();
      EXPECT_LE(host_bytes_per_parameter(model, 1.0, micro_batches), 14.5) << name;
      EXPECT_GE(host_bytes_per_parameter(model, 1.0, micro_batches), 14.0) << name;
      EXPECT_LE(host_bytes_per_parameter(model, 0.0, micro_batches), 12.5) << name;
      EXPECT_GE(host_bytes_per_parameter(model, 0.0, micro_batches), 12.0) << name;
    }
  }
}

struct Footprint {
  size_t bytes = 0;
  size_t threads = 0;
  size_t files = 0;
};

// Threads of a destroyed engine's teams end by themselves a moment later.
Footprint footprint(size_t wanted_threads) {
  for (int tries = 0; thread_count() > wanted_threads && tries < 200; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  ::malloc_trim(0);
  return {resident_bytes(), thread_count(), open_files()};
}

// Allocators settle within a few rounds; one engine of these tests alone would be more.
constexpr double kKept = 512 * 1024;

// Runs `round` 20 times; what is there after the last is what was there after the second.
void expect_no_growth(const std::function<void()>& round) {
  Footprint second;
  for (int i = 1; i <= 20; ++i) {
    round();
    if (i == 2) second = footprint(0);
  }
  const Footprint last = footprint(second.threads);
  EXPECT_EQ(last.threads, second.threads);
  EXPECT_EQ(last.files, second.files);
  if (!kSanitized) {
    EXPECT_LE(static_cast<double>(last.bytes), 1.01 * static_cast<double>(second.bytes) + kKept);
  }
}

TEST(Footprint, TwentySavesLeaveNothingBehind) {
  const TempFolder folder;
  write_tiny_model(folder / "model", TinyFamily::kLlama);
  EngineConfig config = tiny_engine_config(Precision::kBF16);
  config.placement.device_optimizer_blocks = 2;
  const auto engine = Engine::open((folder / "model").string(), config);
  int64_t step = 0;
  expect_no_growth([&] {
    ++step;
    run(*engine, {.from = step, .until = step});
    engine->save_checkpoint((folder / "run").string(), "", 2);
  });
}

TEST(Footprint, TwentyEnginesLeaveNothingBehind) {
  const TempFolder folder;
  write_tiny_model(folder / "model", TinyFamily::kQwen3);
  write_tiny_model(folder / "damaged", TinyFamily::kQwen3);
  std::filesystem::resize_file(folder / "damaged" / "model.safetensors", 3000);
  EngineConfig config = tiny_engine_config(Precision::kBF16);
  config.threads = 2;
  expect_no_growth([&] {
    run(*Engine::open((folder / "model").string(), config), {.until = 2});
    EXPECT_THROW(Engine::open((folder / "damaged").string(), config), Error);
  });
}

}  // namespace
}  // namespace orlop::test
