// What any number of ranks saves, any number loads.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <mutex>
#include <string>
#include <vector>

#include "formats/safetensors.h"
#include "orlop/error.h"
#include "tests/formats/support.h"
#include "tests/support/rank_run.h"
#include "tests/support/tiny_model.h"

namespace orlop::test {
namespace {

namespace fs = std::filesystem;

constexpr int kMaxRanks = 4;
constexpr int64_t kAllMicroBatches = 12;

class RanksResume : public ::testing::Test {
 protected:
  std::string write_model(TinyFamily family) {
    write_tiny_model(folder_ / "model", family);
    return (folder_ / "model").string();
  }
  std::string run_dir(const std::string& name) const { return (folder_ / name).string(); }

  static EngineConfig config_for(int ranks, Precision precision) {
    EngineConfig config = tiny_engine_config(precision);
    config.batch.micro_batch_size = 1;
    config.batch.accumulation_steps = kAllMicroBatches / ranks;
    config.optimizer.learning_rate = 1e-4;
    return config;
  }

  TempFolder folder_;
};

struct Halves {
  RunRecord before;  // steps 1 to 4
  RunRecord after;   // steps 5 to 14
};

// Case C-01: ten steps beyond the save, on every pair of numbers.
TEST_F(RanksResume, OnAnyNumberOfRanks) {
  const std::string model = write_model(TinyFamily::kLlama);
  std::vector<Halves> straight(kMaxRanks + 1);
  std::mutex mutex;
  for (int ranks = 1; ranks <= kMaxRanks; ++ranks) {
    run_engines(ranks, model, config_for(ranks, Precision::kF32), [&](Engine& engine) {
      Halves halves;
      halves.before = run_share(engine, kAllMicroBatches, {.until = 4, .last = 14});
      const std::string saved =
          engine.save_checkpoint(run_dir(std::to_string(ranks)), "the caller's", 1);
      EXPECT_EQ(saved, Engine::latest_checkpoint(run_dir(std::to_string(ranks))));
      halves.after = run_share(engine, kAllMicroBatches, {.from = 5, .until = 14, .last = 14});
      std::lock_guard lock(mutex);
      if (engine.rank() == 0) straight[static_cast<size_t>(ranks)] = halves;
    });
  }
  for (int saved = 1; saved <= kMaxRanks; ++saved) {
    for (int ranks = 1; ranks <= kMaxRanks; ++ranks) {
      if (!is_tried(static_cast<size_t>(ranks), static_cast<size_t>(saved - 1), kMaxRanks))
        continue;
      SCOPED_TRACE(std::to_string(saved) + " ranks saved, " + std::to_string(ranks) + " resume");
      EngineConfig config = config_for(ranks, Precision::kF32);
      config.placement.device_optimizer_blocks = ranks;
      config.from_scratch = true;  // nothing of the model's own weights is left
      const std::string checkpoint = Engine::latest_checkpoint(run_dir(std::to_string(saved)));
      const Halves& expected = straight[static_cast<size_t>(saved)];
      run_engines(ranks, model, config, [&](Engine& engine) {
        EXPECT_EQ(engine.load_checkpoint(checkpoint), "the caller's");
        EXPECT_EQ(engine.steps_done(), 4);
        EXPECT_TRUE(same_states(expected.before.states, read_states(engine)));
        const RunRecord found =
            run_share(engine, kAllMicroBatches, {.from = 5, .until = 14, .last = 14});
        if (ranks == saved) {
          EXPECT_TRUE(same_bits(expected.after, found));
        }
        for (size_t i = 0; i < found.losses.size(); ++i) {
          EXPECT_NEAR(found.losses[i], expected.after.losses[i], 1e-5 * expected.after.losses[i]);
        }
      });
    }
  }
}

TEST_F(RanksResume, WithHalvesAndRoundedMoments) {
  const std::string model = write_model(TinyFamily::kGpt2);
  for (const Precision precision : {Precision::kBF16, Precision::kF16}) {
    EngineConfig config = config_for(3, precision);
    config.optimizer.moments = precision == Precision::kBF16 ? DType::kBF16 : DType::kF32;
    const std::string run = run_dir(std::to_string(static_cast<int>(precision)));
    States saved;
    run_engines(3, model, config, [&](Engine& engine) {
      run_share(engine, kAllMicroBatches, {.until = 3, .last = 3});
      engine.save_checkpoint(run, "", 1);
      const States states = read_states(engine);
      if (engine.rank() == 0) saved = states;
    });
    run_engines(2, model, config, [&](Engine& engine) {
      engine.load_checkpoint(Engine::latest_checkpoint(run));
      EXPECT_TRUE(same_states(saved, read_states(engine)));
    });
  }
}

// The steps that go on meanwhile are those of a run that waits, and so is what is saved.
TEST_F(RanksResume, SavesInTheBackground) {
  const std::string model = write_model(TinyFamily::kLlamaTied);
  const auto run_saving = [&](SaveMode mode, const std::string& run) {
    RunRecord record;
    run_engines(3, model, config_for(3, Precision::kBF16), [&](Engine& engine) {
      for (int64_t step = 1; step <= 6; ++step) {
        const RunRecord one =
            run_share(engine, kAllMicroBatches, {.from = step, .until = step, .last = 0});
        engine.save_checkpoint(run_dir(run), std::to_string(step), 6, mode);
        if (engine.rank() != 0) continue;
        record.losses.push_back(one.losses.front());
        record.norms.push_back(one.norms.front());
        record.states = one.states;
      }
      engine.wait_for_save();
    });
    return record;
  };
  EXPECT_TRUE(same_bits(run_saving(SaveMode::kWait, "waiting"),
                        run_saving(SaveMode::kBackground, "beside")));
  for (const int step : {1, 4, 6}) {
    for (int rank = 0; rank < 3; ++rank) {
      const fs::path file = fs::path("step-" + std::to_string(step)) / "optim" /
                            ("rank-" + std::to_string(rank) + ".safetensors");
      const SafetensorsReader waiting(fs::path(run_dir("waiting")) / file);
      const SafetensorsReader beside(fs::path(run_dir("beside")) / file);
      ASSERT_EQ(waiting.tensors().size(), beside.tensors().size());
      for (const TensorInfo& tensor : waiting.tensors()) {
        std::vector<std::byte> expected(tensor.bytes);
        std::vector<std::byte> found(tensor.bytes);
        waiting.read(tensor, 0, expected);
        beside.read(beside.at(tensor.name), 0, found);
        EXPECT_TRUE(expected == found) << file << ' ' << tensor.name;
      }
    }
  }
}

// Case C-04: sizes of which many are odd, and none is a multiple of what is aligned to. No padding:
// the files together hold every element once, and another number of ranks finds them again.
TEST_F(RanksResume, FilesHoldWhatTheirRankHas) {
  write_tiny_model(folder_ / "model", TinyFamily::kGpt2,
                   {.hidden = 35, .heads = 5, .kv_heads = 5, .intermediate = 37, .positions = 47});
  const std::string model = (folder_ / "model").string();
  const EngineConfig config = config_for(3, Precision::kF32);
  int64_t numel = 0;
  States saved;
  run_engines(3, model, config, [&](Engine& engine) {
    run_share(engine, kAllMicroBatches, {.until = 2, .last = 2});
    engine.save_checkpoint(run_dir("run"), "", 1);
    const States states = read_states(engine);
    if (engine.rank() != 0) return;
    saved = states;
    for (const TensorDescription& tensor : engine.tensors()) {
      int64_t elements = 1;
      for (const int64_t length : tensor.shape) elements *= length;
      numel += elements;
    }
  });
  int64_t stored = 0;
  const fs::path step = Engine::latest_checkpoint(run_dir("run"));
  for (int rank = 0; rank < 3; ++rank) {
    const SafetensorsReader reader(step / "optim" /
                                   ("rank-" + std::to_string(rank) + ".safetensors"));
    for (const TensorInfo& tensor : reader.tensors()) stored += tensor.numel();
  }
  EXPECT_EQ(stored, 3 * numel) << "master and two moments";
  EXPECT_FALSE(fs::exists(step / "optim" / "rank-3.safetensors"));
  run_engines(2, model, config, [&](Engine& engine) {
    engine.load_checkpoint(step.string());
    EXPECT_TRUE(same_states(saved, read_states(engine)));
  });
}

// The error names what is wrong, on every rank, before any state has changed.
TEST_F(RanksResume, RefusesDamageOnAllRanks) {
  const std::string model = write_model(TinyFamily::kLlama);
  const EngineConfig config = config_for(2, Precision::kF32);
  run_engines(2, model, config,
              [&](Engine& engine) { engine.save_checkpoint(run_dir("run"), "", 1); });
  const std::string checkpoint = Engine::latest_checkpoint(run_dir("run"));
  const fs::path file = fs::path(checkpoint) / "optim" / "rank-1.safetensors";
  std::string bytes = slurp(file);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  spill(file, bytes);
  for (const int ranks : {1, 3}) {
    run_engines(ranks, model, config, [&](Engine& engine) {
      const States before = read_states(engine);
      try {
        engine.load_checkpoint(checkpoint);
        ADD_FAILURE() << "a damaged file was read";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kInvalidData);
        EXPECT_THAT(error.what(), testing::HasSubstr("rank-1.safetensors' is damaged"));
      }
      EXPECT_TRUE(same_states(before, read_states(engine)));
    });
  }
}

// What rank 0 cannot write is every rank's error, and the run goes on.
TEST_F(RanksResume, FailedSavesAndExportsAreToldToAll) {
  const std::string model = write_model(TinyFamily::kLlama);
  const EngineConfig config = config_for(3, Precision::kF32);
  spill(folder_ / "file", "no folder");
  run_engines(3, model, config, [&](Engine& engine) {
    EXPECT_THROW(engine.save_checkpoint((folder_ / "file" / "run").string(), "", 1), Error);
    EXPECT_THROW(engine.export_hf((folder_ / "file" / "out").string()), Error);
    EXPECT_THROW(engine.export_hf(model), Error);
    EXPECT_NO_THROW(run_share(engine, kAllMicroBatches, {.until = 1, .last = 1}));
    EXPECT_FALSE(engine.save_checkpoint(run_dir("run"), "", 1).empty());
  });
}

TEST_F(RanksResume, ExportsTheSameFolder) {
  const std::string model = write_model(TinyFamily::kLlamaTied);
  const EngineConfig config = config_for(3, Precision::kBF16);
  run_engines(3, model, config, [&](Engine& engine) {
    run_share(engine, kAllMicroBatches, {.until = 2, .last = 2});
    engine.save_checkpoint(run_dir("run"), "", 1);
    engine.export_hf((folder_ / "three").string());
  });
  const auto single = Engine::open(model, config_for(1, Precision::kBF16));
  single->load_checkpoint(Engine::latest_checkpoint(run_dir("run")));
  single->export_hf((folder_ / "one").string());
  EXPECT_TRUE(slurp(folder_ / "one" / "model.safetensors") ==
              slurp(folder_ / "three" / "model.safetensors"));
  EXPECT_TRUE(slurp(folder_ / "one" / "config.json") == slurp(folder_ / "three" / "config.json"));
}

}  // namespace
}  // namespace orlop::test
