// A run that is interrupted and resumed, anywhere and in any placement, ends as the straight run
// does.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "formats/safetensors.h"
#include "orlop/engine.h"
#include "tests/formats/support.h"
#include "tests/nvme/mounts.h"
#include "tests/support/engine_run.h"
#include "tests/support/process.h"
#include "tests/support/tiny_model.h"

namespace orlop::test {
namespace {

namespace fs = std::filesystem;

struct Placement {
  const char* name;
  void (*apply)(EngineConfig&);
};

// One swap directory for every engine of this file; they live one after the other.
std::string swap_dir() {
  static const TempFolder folder;
  return folder.path().string();
}

void swap_states(EngineConfig& config, int states, int weights) {
  config.nvme.paths = {swap_dir()};
  config.placement.nvme_optimizer_blocks = states;
  config.placement.nvme_param_blocks = weights;
  config.placement.swap_chunk = 4096;
}

const Placement kPlacements[] = {
    {"free", [](EngineConfig&) {}},
    {"least",
     [](EngineConfig& c) {
       c.placement.resident_blocks = 0;
       c.placement.prefetch_depth = 0;
       c.placement.activations = Tier::kHost;
       c.placement.wave = 1;
     }},
    {"device optimizer", [](EngineConfig& c) { c.placement.device_optimizer_blocks = 3; }},
    {"all on the device",
     [](EngineConfig& c) {
       c.placement.device_optimizer_blocks = 5;
       c.placement.activations = Tier::kDevice;
     }},
    {"optimizer states on a drive", [](EngineConfig& c) { swap_states(c, 4, 0); }},
    {"all on a drive", [](EngineConfig& c) { swap_states(c, 5, 5); }},
    {"part of every block on a drive", [](EngineConfig& c) {
       swap_states(c, 5, 5);
       c.placement.nvme_optimizer_share = 0.6;
       c.placement.nvme_param_share = 0.3;
     }}};

RunRecord tail(const RunRecord& record, size_t from) {
  RunRecord rest = record;
  const auto skip = static_cast<std::ptrdiff_t>(from);
  rest.losses.erase(rest.losses.begin(), rest.losses.begin() + skip);
  rest.norms.erase(rest.norms.begin(), rest.norms.begin() + skip);
  rest.skipped.erase(rest.skipped.begin(), rest.skipped.begin() + skip);
  return rest;
}

class Resume : public ::testing::Test {
 protected:
  std::string write_model(TinyFamily family) {
    write_tiny_model(folder_ / "model", family);
    return (folder_ / "model").string();
  }
  std::string run_dir() const { return (folder_ / "run").string(); }

  TempFolder folder_;
};

// Case C-11: saved from every kind of memory, the bytes are the same, and load into every kind.
TEST_F(Resume, InAnyPlacementContinuesTheStraightRun) {
  struct Case {
    Precision precision;
    DType moments;
  };
  const std::string model = write_model(TinyFamily::kQwen2);
  const RunOptions to_end{.from = 5, .until = 9};
  for (const Case c : {Case{Precision::kF32, DType::kF32}, Case{Precision::kBF16, DType::kBF16},
                       Case{Precision::kF16, DType::kF32}}) {
    EngineConfig config = tiny_engine_config(c.precision);
    config.optimizer.moments = c.moments;
    auto straight = Engine::open(model, config);
    run(*straight, {.until = 4});
    const States at_save = read_states(*straight);
    const std::string saved = straight->save_checkpoint(run_dir(), "at 4", 1);
    const RunRecord expected = run(*straight, to_end);
    straight.reset();
    // What is saved does not tell where it was: host memory, that of the device, or a drive.
    for (const auto& elsewhere :
         {+[](EngineConfig& c) { swap_states(c, 5, 2); },
          +[](EngineConfig& c) { c.placement.device_optimizer_blocks = 5; }}) {
      EngineConfig moved = config;
      elsewhere(moved);
      const auto other = Engine::open(model, moved);
      run(*other, {.until = 4});
      const std::string again = other->save_checkpoint((folder_ / "moved").string(), "at 4", 1);
      const char* const states = "optim/rank-0.safetensors";
      EXPECT_TRUE(slurp(fs::path(saved) / states) == slurp(fs::path(again) / states));
    }
    for (const Placement& placement : kPlacements) {
      EngineConfig other = config;
      placement.apply(other);
      other.threads = 2;
      const auto resumed = Engine::open(model, other);
      EXPECT_EQ(resumed->load_checkpoint(saved), "at 4");
      EXPECT_EQ(resumed->stats().skipped_steps + resumed->steps_done(), 4);
      EXPECT_TRUE(same_states(at_save, read_states(*resumed))) << placement.name;
      EXPECT_TRUE(same_bits(expected, run(*resumed, to_end))) << placement.name;
    }
  }
}

// Case C-16: the checkpoint holds what was on the drive. Neither the swap directory nor the folders
// of the first run are there any more when another one goes on.
TEST_F(Resume, WithoutTheDriveThatHeldTheStates) {
  const std::string model = write_model(TinyFamily::kLlama);
  EngineConfig config = tiny_engine_config(Precision::kBF16);
  config.nvme.paths = {(folder_ / "swap").string()};
  config.placement.nvme_optimizer_blocks = config.placement.nvme_param_blocks = 5;
  config.placement.swap_chunk = 4096;
  auto engine = Engine::open(model, config);
  run(*engine, {.until = 3});
  const States saved = read_states(*engine);
  engine->save_checkpoint(run_dir(), "", 1);
  const RunRecord expected = run(*engine, {.from = 4, .until = 6});
  engine.reset();
  fs::remove_all(folder_ / "swap");
  fs::create_directory(folder_ / "elsewhere");
  for (const char* name : {"model", "run"})
    fs::rename(folder_ / name, folder_ / "elsewhere" / name);

  const EngineConfig in_memory = tiny_engine_config(Precision::kBF16);
  config.nvme.paths = {(folder_ / "elsewhere" / "swap").string()};
  for (const EngineConfig& other : {config, in_memory}) {
    const auto resumed = Engine::open((folder_ / "elsewhere" / "model").string(), other);
    resumed->load_checkpoint(Engine::latest_checkpoint((folder_ / "elsewhere" / "run").string()));
    EXPECT_TRUE(same_states(saved, read_states(*resumed)));
    EXPECT_TRUE(same_bits(expected, run(*resumed, {.from = 4, .until = 6})));
  }
}

TEST_F(Resume, SavesAtOnceWhatItLoaded) {
  const std::string model = write_model(TinyFamily::kLlama);
  EngineConfig config = tiny_engine_config(Precision::kBF16);
  const auto first = Engine::open(model, config);
  run(*first, {.until = 3});
  const std::string saved = first->save_checkpoint(run_dir(), "mine", 1);

  config.placement.device_optimizer_blocks = 2;
  const auto second = Engine::open(model, config);
  EXPECT_EQ(second->load_checkpoint(saved), "mine");
  const std::string again = second->save_checkpoint((folder_ / "again").string(), "mine", 1);
  const char* const states = "optim/rank-0.safetensors";
  EXPECT_EQ(slurp(fs::path(saved) / states), slurp(fs::path(again) / states));

  const auto third = Engine::open(model, config);
  third->load_checkpoint(again);
  EXPECT_TRUE(
      same_bits(run(*first, {.from = 4, .until = 6}), run(*third, {.from = 4, .until = 6})));
  EXPECT_TRUE(third->save_checkpoint((folder_ / "again").string(), "", 2).ends_with("step-6"));
}

TEST_F(Resume, GoesBackInTheProcessThatSaved) {
  const auto engine =
      Engine::open(write_model(TinyFamily::kGpt2), tiny_engine_config(Precision::kBF16));
  run(*engine, {.until = 4});
  const std::string saved = engine->save_checkpoint(run_dir(), "", 1);
  const RunOptions next{.from = 5, .until = 8};
  const RunRecord expected = run(*engine, next);
  engine->save_checkpoint(run_dir(), "", 2);
  engine->load_checkpoint(saved);
  EXPECT_EQ(engine->steps_done(), 4);
  EXPECT_TRUE(same_bits(expected, run(*engine, next)));
}

// A checkpoint of every format version that was ever written stays in golden/ and must load.
TEST_F(Resume, FromEveryStoredFormatVersion) {
  TinyShape shape;
  shape.vocab = 11;
  shape.hidden = 8;
  shape.layers = 1;
  shape.heads = 2;
  shape.kv_heads = 1;
  shape.intermediate = 12;
  write_tiny_model(folder_ / "model", TinyFamily::kLlama, shape);
  EngineConfig config = tiny_engine_config(Precision::kBF16);
  config.placement.device_optimizer_blocks = 1;
  const auto engine = Engine::open((folder_ / "model").string(), config);
  const fs::path stored = fs::path(ORLOP_GOLDEN_DIR) / "checkpoint_version_1" / "step-2";
  EXPECT_EQ(engine->load_checkpoint(stored.string()), "position");
  EXPECT_EQ(engine->steps_done(), 2);
  States expected;
  const SafetensorsReader reader(stored / "optim/rank-0.safetensors");
  for (const TensorInfo& tensor : reader.tensors()) {
    std::vector<float>& values = expected[tensor.name];
    values.resize(static_cast<size_t>(tensor.numel()));
    reader.read(tensor, 0, std::as_writable_bytes(std::span(values)));
  }
  EXPECT_TRUE(same_states(expected, read_states(*engine)));
  const RunRecord next = run(*engine, {.vocab = shape.vocab, .from = 3, .until = 4});
  EXPECT_FALSE(next.skipped.front());
}

// The checkpoints of a run that was left behind by going back have larger numbers.
TEST_F(Resume, TheNewestIsTheOneThatWasSavedLast) {
  const auto engine =
      Engine::open(write_model(TinyFamily::kLlama), tiny_engine_config(Precision::kF32));
  run(*engine, {.until = 1});
  const std::string early = engine->save_checkpoint(run_dir(), "", 2);
  run(*engine, {.from = 2, .until = 4});
  const std::string left = engine->save_checkpoint(run_dir(), "", 2);
  engine->load_checkpoint(early);
  run(*engine, {.from = 2, .until = 2});
  const std::string saved = engine->save_checkpoint(run_dir(), "after going back", 2);
  EXPECT_EQ(Engine::latest_checkpoint(run_dir()), saved);
  EXPECT_EQ(engine->load_checkpoint(saved), "after going back");
  EXPECT_FALSE(fs::exists(early)) << "two are kept";
  EXPECT_TRUE(fs::exists(left));
  run(*engine, {.from = 3, .until = 4});
  EXPECT_EQ(engine->save_checkpoint(run_dir(), "again", 1), left) << "the same step";
  EXPECT_EQ(engine->load_checkpoint(Engine::latest_checkpoint(run_dir())), "again");
  EXPECT_FALSE(fs::exists(saved));
}

// Every second worker has its states on a drive, and leaves its swap file to the next one.
TEST_F(Resume, AfterAKillAtAnyMomentLosesAtMostTheStepsSinceTheLastSave) {
  const std::string model = write_model(TinyFamily::kLlamaTied);
  EngineConfig config = tiny_engine_config(Precision::kBF16);
  constexpr int64_t kLast = 9;
  const RunRecord straight = run(*Engine::open(model, config), {.until = kLast, .last = -1});
  std::mt19937_64 random(11);
  for (int repetition = 0; repetition < 20; ++repetition) {
    const std::string dir = (folder_ / ("killed-" + std::to_string(repetition))).string();
    const bool waits = repetition < 10;
    const int64_t kill_at = 3 + repetition % 5;
    {
      std::vector<std::string> command = {ORLOP_TRAIN_WORKER, waits ? "train" : "train-on", model,
                                          dir};
      if (repetition / 2 % 2 == 1) command.push_back(swap_dir());
      ChildProcess worker(command);
      // In a step, or at some moment of a save; the step before is complete then.
      const char* const event = repetition % 2 == 0 ? "step " : "save ";
      ASSERT_TRUE(worker.read_until(event + std::to_string(kill_at)));
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 12000));
      worker.kill();
      EXPECT_EQ(worker.wait(), -SIGKILL);
    }
    const std::string newest = Engine::latest_checkpoint(dir);
    ASSERT_FALSE(newest.empty()) << repetition;
    EngineConfig other = config;
    if (repetition % 3 == 1) swap_states(other, 5, 1);
    const auto resumed = Engine::open(model, other);
    const int64_t step = std::stoll(resumed->load_checkpoint(newest));
    EXPECT_EQ(resumed->steps_done(), step);
    // A save in the background may still run in the step after it.
    EXPECT_GE(step, kill_at - (waits ? 1 : 2));
    if (step >= kLast) continue;
    const RunRecord rest = run(*resumed, {.from = step + 1, .until = kLast, .last = -1});
    EXPECT_TRUE(same_bits(tail(straight, static_cast<size_t>(step)), rest)) << newest;
    resumed->save_checkpoint(dir, "", 1);
    EXPECT_EQ(fs::directory_iterator(dir)->path().filename(), "step-" + std::to_string(kLast))
        << "leftovers of the interrupted save are gone";
  }
}

// Expects that saving into run_dir fails and harms nothing.
void expect_full_disk(Engine& engine, const std::string& run_dir, const std::string& intact) {
  const States before = read_states(engine);
  const std::string text =
      error_of(ErrorCode::kIo, [&] { engine.save_checkpoint(run_dir, "", 1); });
  EXPECT_NE(text.find(run_dir), std::string::npos) << text;
  EXPECT_EQ(Engine::latest_checkpoint(run_dir), intact);
  EXPECT_TRUE(same_states(before, read_states(engine)));
}

TEST_F(Resume, AFullDiskLeavesOlderCheckpointsAndTheRun) {
  auto mount = nvme::Mount::tmpfs(1);
  ORLOP_SKIP_UNLESS_MOUNTED(mount);
  const std::string model = write_model(TinyFamily::kLlama);
  const EngineConfig config = tiny_engine_config(Precision::kBF16);
  const RunRecord expected = run(*Engine::open(model, config), {.until = 4});

  const auto engine = Engine::open(model, config);
  RunRecord record = run(*engine, {.until = 2});
  const std::string intact = engine->save_checkpoint(mount.path(), "", 1);
  const fs::space_info space = fs::space(mount.path());
  spill(fs::path(mount.path()) / "ballast", std::string(space.available - 20000, 'x'));
  const RunRecord third = run(*engine, {.from = 3, .until = 3});
  expect_full_disk(*engine, mount.path(), intact);
  const RunRecord fourth = run(*engine, {.from = 4, .until = 4});
  for (const RunRecord* more : {&third, &fourth}) {
    record.losses.push_back(more->losses.front());
    record.norms.push_back(more->norms.front());
    record.skipped.push_back(more->skipped.front());
  }
  record.states = fourth.states;
  EXPECT_TRUE(same_bits(expected, record));
  fs::remove(fs::path(mount.path()) / "ballast");
  EXPECT_TRUE(engine->save_checkpoint(mount.path(), "", 1).ends_with("step-4"));
}

TEST_F(Resume, ALimitOnFileLengthsIsAnErrorAndNoSignal) {
  const auto engine =
      Engine::open(write_model(TinyFamily::kQwen3), tiny_engine_config(Precision::kF32));
  run(*engine, {.until = 1});
  const std::string intact = engine->save_checkpoint(run_dir(), "", 1);
  run(*engine, {.from = 2, .until = 2});
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit limited{32768, before.rlim_max};
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limited), 0);
  expect_full_disk(*engine, run_dir(), intact);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  ::signal(SIGXFSZ, handler);
  run(*engine, {.from = 3, .until = 3});
  EXPECT_TRUE(engine->save_checkpoint(run_dir(), "", 1).ends_with("step-3"));
}

}  // namespace
}  // namespace orlop::test
