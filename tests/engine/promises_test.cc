// What a plan promises about memory, and what an engine leaves behind.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/backend_factory.h"
#include "orlop/engine.h"
#include "tests/engine/measured_peak.h"
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

class PlannedMemory : public ::testing::TestWithParam<RunKind> {};

// Cases R-01 (states in host memory: no more than 3 % above the plan), R-16 (states on a drive)
// and, of its host memory, U-08.
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
  const MeasuredPeak taken = measure_beyond_tiny("memory", folder, how);
  EXPECT_GT(taken.planned, GetParam().device_blocks < 0 ? 100e6 : 200e6);
  expect_as_planned(taken, ::testing::PrintToString(GetParam()));
  if (GetParam().device_blocks == 0) {
    EXPECT_LE(taken.peak, 1.03 * taken.planned);
  }
}

// Optimizer states in host memory, all of them on the device, and on a drive, with block inputs or
// without.
INSTANTIATE_TEST_SUITE_P(, PlannedMemory,
                         ::testing::Values(RunKind{0, 1}, RunKind{5, 1}, RunKind{0, 0},
                                           RunKind{5, 0}, RunKind{2, 1, true}, RunKind{-1, 1},
                                           RunKind{-1, 0}, RunKind{-2, 1}));

// Weights alone, in host memory or on the device: 2 bytes per parameter, and what one pass needs.
TEST(PlannedMemoryOfAnEvaluation, IsTheWeights) {
  if (kSanitized) GTEST_SKIP() << "sanitizers take memory of their own";
  const TempFolder folder;
  TinyShape shape;
  shape.hidden = 1024;
  shape.intermediate = 2816;
  shape.heads = 8;
  shape.layers = 8;
  std::filesystem::create_directory(folder / "large");
  write_tiny_model(folder / "large", TinyFamily::kLlama, shape);
  std::filesystem::create_directory(folder / "tiny");
  write_tiny_model(folder / "tiny", TinyFamily::kLlama);
  const auto weights =
      static_cast<double>(std::filesystem::file_size(folder / "large" / "model.safetensors")) / 2;
  for (const char* const on_device : {"0", "5"}) {
    const MeasuredPeak taken = measure_beyond_tiny("memory-eval", folder, {on_device});
    expect_as_planned(taken, fmt::format("weights of {:.1f} MiB, {} blocks on the device",
                                         weights / 1048576, on_device));
    EXPECT_LE(taken.planned, weights * (1 + 4 / 8.0)) << "three layers are fetched at once";
  }
}

// Case R-07: ranks of one machine hold every state once between them, each its part, also while
// they read the weights: no rank has the whole model in memory at any moment, and each byte of the
// file is read once.
TEST(PlannedMemoryOfRanks, IsTheirPartsAndEveryWeightIsReadOnce) {
  if (kSanitized) GTEST_SKIP() << "sanitizers take memory of their own";
  const TempFolder folder;
  // Large enough for the matmul workspace of three ranks, of which a run may use little.
  TinyShape shape;
  shape.hidden = 1024;
  shape.intermediate = 2816;
  shape.heads = 8;
  write_tiny_model(folder / "large", TinyFamily::kLlama, shape);
  write_tiny_model(folder / "tiny", TinyFamily::kLlama);
  const auto file =
      static_cast<double>(std::filesystem::file_size(folder / "large" / "model.safetensors"));
  for (const auto& [ranks, wire] : {std::pair("1", "fp32"), {"3", "fp32"}, {"3", "bf16"}}) {
    const MeasuredPeak taken = measure_beyond_tiny("memory-ranks", folder, {ranks, wire});
    expect_as_planned(taken, fmt::format("{} ranks, gradients in {}, {:.3f} of the file read",
                                         ranks, wire, taken.read / file));
    EXPECT_GE(taken.read, file);
    EXPECT_LE(taken.read, 1.02 * file) << ranks << " ranks";
  }
}

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
  MeasuredPeak taken = measure("memory-tight", (folder / "demo").string(), {"0.25", "1"});
  taken.peak -= measure("memory", (folder / "tiny").string(), {"-1", "1"}).peak;
  expect_as_planned(taken, "a quarter of the states in host memory");
}

// A control group of its own with a limit of memory, removed at the end.
class MemoryGroup {
 public:
  explicit MemoryGroup(size_t limit_bytes) {
    namespace fs = std::filesystem;
    const bool is_version_2 = fs::exists("/sys/fs/cgroup/cgroup.controllers");
    const fs::path parent = is_version_2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    std::error_code error;
    const fs::path made = parent / ("orlop-test-" + std::to_string(::getpid()));
    if (!fs::exists(parent) || !fs::create_directory(made, error)) return;
    path_ = made;
    std::ofstream limit(made / (is_version_2 ? "memory.max" : "memory.limit_in_bytes"));
    limit << limit_bytes << std::flush;
    works_ = limit.good();
  }
  ~MemoryGroup() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove(path_, ignored);
  }
  MemoryGroup(const MemoryGroup&) = delete;
  MemoryGroup& operator=(const MemoryGroup&) = delete;

  bool works() const { return works_; }
  // `command` as a process of the group, what it says of errors on its output.
  std::vector<std::string> run_inside(const std::string& command) const {
    return {"/bin/sh", "-c",
            "echo $$ > " + (path_ / "cgroup.procs").string() + " && exec " + command + " 2>&1"};
  }

 private:
  std::filesystem::path path_;
  bool works_ = false;
};

// Case R-06: a container with less memory than the states take: the process ends with the numbers
// and what to do, before it has taken any of it, and is not killed.
TEST(MemoryOfAControlGroup, IsTheBudgetAndTooLittleOfItIsOneError) {
  if (kSanitized) GTEST_SKIP() << "sanitizers take memory of their own";
  const MemoryGroup group(128 << 20);
  if (!group.works()) GTEST_SKIP() << "this machine does not let tests make control groups";
  const TempFolder folder;
  TinyShape shape;
  shape.hidden = 1024;
  shape.intermediate = 2816;
  shape.vocab = 3000;
  spill(folder / "config.json", tiny_config(TinyFamily::kLlama, shape));
  const std::string model = folder.path().string();
  ChildProcess worker(group.run_inside(std::string(ORLOP_TRAIN_WORKER) + " memory " + model + " " +
                                       model + "/run 0 1"));
  std::string said;
  while (const std::optional<std::string> line = worker.read_line()) said += *line + "\n";
  EXPECT_EQ(worker.wait(), 1) << said;
  for (const char* part :
       {"the training step does not fit", "host: needs at least", "short by",
        "of it masters and moments", "of it gradients, waiting for the norm",
        "raise the host budget to that, give directories on drives with --nvme"}) {
    EXPECT_NE(said.find(part), std::string::npos) << part << " in: " << said;
  }
}

// The host's memory as a device whose driver pins so many bytes.
class BackendWithDriver final : public Backend {
 public:
  BackendWithDriver(std::unique_ptr<Backend> inner, size_t most,
                    std::shared_ptr<std::atomic<size_t>> pinned)
      : inner_(std::move(inner)), most_(most), pinned_(std::move(pinned)) {}

  DeviceInfo info() const override {
    DeviceInfo info = inner_->info();
    info.is_host = false;
    return info;
  }
  Queue& queue(QueueKind kind) override { return inner_->queue(kind); }
  std::unique_ptr<Event> make_event() override { return inner_->make_event(); }
  Ops& ops() override { return inner_->ops(); }
  void* allocate_arena(size_t bytes) override { return inner_->allocate_arena(bytes); }
  void register_host_memory(void* address, size_t bytes) override {
    if (*pinned_ + bytes > most_) {
      throw Error(ErrorCode::kOutOfMemory, std::to_string(bytes) + " B refused");
    }
    *pinned_ += bytes;
    inner_->register_host_memory(address, bytes);
  }
  void synchronize() override { inner_->synchronize(); }

 private:
  std::unique_ptr<Backend> inner_;
  const size_t most_;
  const std::shared_ptr<std::atomic<size_t>> pinned_;  // by all backends of the test
};

class PinnedHostMemory : public ::testing::Test {
 protected:
  PinnedHostMemory() {
    TinyShape shape;
    shape.hidden = 128;
    shape.intermediate = 352;
    write_tiny_model(folder_.path(), TinyFamily::kLlama, shape);
    config_.placement.activations = Tier::kDevice;
    config_.placement.resident_blocks = 0;
    config_.placement.device_optimizer_blocks = 0;
  }
  ~PinnedHostMemory() override { decorate_backends(nullptr); }

  std::unique_ptr<Engine> open() const { return Engine::open(folder_.path().string(), config_); }
  // Engines that are opened from now on have such a driver; returns what it has pinned.
  static std::shared_ptr<std::atomic<size_t>> limit(size_t most) {
    auto pinned = std::make_shared<std::atomic<size_t>>(0);
    decorate_backends([most, pinned](std::unique_ptr<Backend> backend) {
      return std::make_unique<BackendWithDriver>(std::move(backend), most, pinned);
    });
    return pinned;
  }

  const TempFolder folder_;
  EngineConfig config_ = tiny_engine_config(Precision::kBF16);
};

// Pageable memory would do at half the speed: no engine opens with it and leaves its user to
// wonder.
TEST_F(PinnedHostMemory, ThatIsRefusedIsAnErrorAndNotReplaced) {
  if (test_device() != "host") GTEST_SKIP() << "drivers pin as much as they like";
  limit(0);
  const std::string text = error_of(ErrorCode::kOutOfMemory, [&] { open(); });
  EXPECT_NE(text.find(" B refused"), std::string::npos) << text;
  decorate_backends(nullptr);
  EXPECT_NO_THROW(open());
}

// Case R-05: a driver that pins half of the plan. Weights and gradients cross the link, masters and
// moments do not: the plan says how much of it has to be pinned, takes that, and no more.
TEST_F(PinnedHostMemory, IsWhatCrossesTheLink) {
  if (test_device() != "host") GTEST_SKIP() << "drivers pin as much as they like";
  limit(SIZE_MAX);
  const PlanReport plan = open()->plan();
  EXPECT_LT(plan.host_pinned_bytes, plan.host_bytes / 2);
  EXPECT_NE(plan.to_text().find("of it pinned"), std::string::npos) << plan.to_text();
  const auto pinned = limit(plan.host_bytes / 2);
  const std::unique_ptr<Engine> engine = open();
  EXPECT_EQ(*pinned, plan.host_pinned_bytes);
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
