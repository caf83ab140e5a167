// Engines that are opened to evaluate only: weights and nothing else, and the loss that an engine
// which trains finds with the same weights.

#include <gtest/gtest.h>

#include <bit>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "orlop/engine.h"
#include "tests/formats/support.h"
#include "tests/support/engine_run.h"
#include "tests/support/rank_run.h"
#include "tests/support/tiny_model.h"

namespace orlop::test {
namespace {

constexpr Precision kPrecisions[] = {Precision::kF32, Precision::kBF16, Precision::kF16};

const char* precision_name(Precision precision) {
  return precision == Precision::kF32 ? "fp32" : precision == Precision::kBF16 ? "bf16" : "fp16";
}

size_t weight_bytes(Precision precision) { return precision == Precision::kF32 ? 4 : 2; }

EngineConfig evaluating(EngineConfig config) {
  config.evaluate_only = true;
  return config;
}

// Other micro-batches than those that the runs of these tests train on.
std::vector<MicroBatch> held_out(const EngineConfig& config) {
  return batches_of_step(config, 61, 1000);
}

uint64_t loss_bits(Engine& engine) {
  return std::bit_cast<uint64_t>(engine.evaluate(held_out(engine.config())).loss);
}

size_t bytes_of(const PlanReport& plan, Tier tier, const std::string& purpose = "") {
  size_t bytes = 0;
  for (const PlanLine& line : plan.lines) {
    if (line.tier == tier && (purpose.empty() || line.purpose == purpose)) bytes += line.bytes;
  }
  return bytes;
}

// From the two blocks that the device needs to all of them, with copies in host memory and without.
std::vector<EngineConfig> placements(const std::string& model, const EngineConfig& config) {
  std::vector<EngineConfig> all;
  EngineConfig least = evaluating(config);
  least.placement.prefetch_depth = 0;
  least.placement.resident_blocks = least.placement.device_optimizer_blocks = 0;
  all.push_back(least);
  all.back().limits.device_bytes = Engine::plan(model, least).device_peak_bytes;
  const int blocks = Engine::plan(model, least).blocks;
  for (const int resident : {1, blocks}) {
    for (const int on_device : {0, 2, blocks}) {
      all.push_back(evaluating(config));
      all.back().placement.resident_blocks = resident;
      all.back().placement.device_optimizer_blocks = on_device;
    }
  }
  all.push_back(evaluating(config));  // what the planner chooses
  return all;
}

class EvaluateOnly : public ::testing::TestWithParam<TinyFamily> {};

TEST_P(EvaluateOnly, FindsTheBitsOfAnEngineThatTrainsFromAFolderAndFromACheckpoint) {
  const TempFolder folder;
  const std::string model = (folder / "model").string();
  std::filesystem::create_directory(model);
  write_tiny_model(model, GetParam());
  for (const Precision precision : kPrecisions) {
    const EngineConfig config = tiny_engine_config(precision);
    EngineConfig trains = config;
    trains.optimizer.decoupled = precision != Precision::kF16;  // weights alone do not care
    const auto training = Engine::open(model, trains);
    const uint64_t before = loss_bits(*training);
    run(*training, {.until = 3});
    const std::string saved = training->save_checkpoint(
        (folder / precision_name(precision)).string(), "where the data is", 1);
    const uint64_t after = loss_bits(*training);
    ASSERT_NE(before, after);
    for (const EngineConfig& placed : placements(model, config)) {
      const auto engine = Engine::open(model, placed);
      const std::string where = engine->plan().to_text();
      EXPECT_EQ(loss_bits(*engine), before) << precision_name(precision) << '\n' << where;
      EXPECT_EQ(engine->load_checkpoint(saved), "where the data is");
      EXPECT_EQ(engine->steps_done(), 3);
      EXPECT_EQ(loss_bits(*engine), after) << precision_name(precision) << '\n' << where;
      EXPECT_EQ(loss_bits(*engine), after) << "a second time";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, EvaluateOnly,
                         ::testing::Values(TinyFamily::kLlama, TinyFamily::kLlamaTied,
                                           TinyFamily::kGpt2),
                         [](const auto& info) { return std::string(family_name(info.param)); });

TEST(EvaluateOnlyOfRanks, FindsTheBitsOfRanksThatTrain) {
  const TempFolder folder;
  const std::string model = folder.path().string();
  write_tiny_model(folder.path(), TinyFamily::kLlamaTied);
  EngineConfig config = tiny_engine_config(Precision::kBF16);
  const auto losses = [&](const EngineConfig& opened) {
    std::vector<uint64_t> of_ranks(3);
    run_engines(3, model, opened, [&](Engine& engine) {
      const std::vector<MicroBatch> share = share_of(held_out(config), engine.rank(), 3);
      of_ranks[static_cast<size_t>(engine.rank())] =
          std::bit_cast<uint64_t>(engine.evaluate(share).loss);
    });
    return of_ranks;
  };
  const std::vector<uint64_t> expected = losses(config);
  for (const int on_device : {0, 2}) {
    EngineConfig opened = evaluating(config);
    opened.placement.device_optimizer_blocks = on_device;
    EXPECT_EQ(losses(opened), expected) << on_device;
  }
  const size_t three = Engine::plan(model, evaluating(config), 3).state_bytes;
  const size_t one = Engine::plan(model, evaluating(config), 1).state_bytes;
  EXPECT_NEAR(3.0 * static_cast<double>(three), static_cast<double>(one),
              0.05 * static_cast<double>(one));
}

// The weights that it exports are, byte for byte, those of an engine that trains.
TEST(EvaluateOnlyExport, WritesTheWeightsOfAnEngineThatTrains) {
  const TempFolder folder;
  const std::string model = (folder / "model").string();
  std::filesystem::create_directory(model);
  write_tiny_model(model, TinyFamily::kQwen2);
  for (const Precision precision : kPrecisions) {
    const EngineConfig config = tiny_engine_config(precision);
    const std::string name = precision_name(precision);
    Engine::open(model, config)->export_hf((folder / (name + "-training")).string());
    Engine::open(model, evaluating(config))->export_hf((folder / (name + "-evaluating")).string());
    EXPECT_EQ(slurp(folder / (name + "-training") / "model.safetensors"),
              slurp(folder / (name + "-evaluating") / "model.safetensors"))
        << name;
  }
}

TEST(EvaluateOnlyPlan, HostBytesAreTheWeightsAndItsLinesAddUp) {
  const TempFolder folder;
  TinyShape shape;
  shape.hidden = 512;
  shape.intermediate = 1408;
  shape.layers = 8;
  shape.heads = 8;
  spill(folder / "config.json", tiny_config(TinyFamily::kLlama, shape));
  const std::string model = folder.path().string();
  for (const Precision precision : kPrecisions) {
    EngineConfig config = evaluating(tiny_engine_config(precision));
    config.placement.device_optimizer_blocks = 0;
    EXPECT_EQ(Engine::plan(model, config).resident_blocks, 0) << "a second copy serves nothing";
    for (const int resident : {0, 10}) {
      config.placement.resident_blocks = resident;
      const PlanReport plan = Engine::plan(model, config);
      const size_t weights = static_cast<size_t>(plan.parameters) * weight_bytes(precision);
      const size_t layer = weights / 8;
      std::printf("%s, %d blocks resident: weights %zu B, host %zu B, device %zu B\n",
                  precision_name(precision), resident, weights, plan.host_bytes,
                  plan.device_peak_bytes);
      EXPECT_TRUE(plan.evaluates_only);
      EXPECT_GE(plan.host_bytes, weights);
      EXPECT_LE(plan.host_bytes, weights + 3 * layer);
      EXPECT_EQ(bytes_of(plan, Tier::kHost), plan.host_bytes);
      EXPECT_EQ(bytes_of(plan, Tier::kDevice), plan.device_peak_bytes);
      EXPECT_EQ(bytes_of(plan, Tier::kHost, "weights"), plan.state_bytes);
      for (const PlanLine& line : plan.lines) {
        EXPECT_EQ(line.purpose.find("gradient"), std::string::npos) << line.purpose;
        EXPECT_EQ(line.purpose.find("moments"), std::string::npos) << line.purpose;
      }
      EXPECT_EQ(plan.to_text().find("update"), std::string::npos) << plan.to_text();
      EXPECT_EQ(plan.save_bytes, 0u);
      EXPECT_GT(plan.step_seconds, 0);
    }
  }
}

TEST(EvaluateOnlyPlan, TooSmallABudgetIsRefusedWithTheShortage) {
  const TempFolder folder;
  spill(folder / "config.json", tiny_config(TinyFamily::kLlama));
  const std::string model = folder.path().string();
  EngineConfig config = evaluating(tiny_engine_config(Precision::kBF16));
  config.placement.device_optimizer_blocks = config.placement.resident_blocks = 0;
  config.placement.prefetch_depth = 0;
  const PlanReport plan = Engine::plan(model, config);
  config.limits.device_bytes = plan.device_peak_bytes;
  config.limits.host_bytes = plan.host_bytes;
  EXPECT_NO_THROW(Engine::plan(model, config));
  config.limits.host_bytes = plan.host_bytes - 256;
  const std::string host = error_of(ErrorCode::kDoesNotFit, [&] { Engine::plan(model, config); });
  config.limits.host_bytes = plan.host_bytes;
  config.limits.device_bytes = plan.device_peak_bytes - 256;
  const std::string device = error_of(ErrorCode::kDoesNotFit, [&] { Engine::plan(model, config); });
  for (const auto& [text, tier] : {std::pair(host, "host"), {device, "device"}}) {
    EXPECT_NE(text.find("the evaluation does not fit"), std::string::npos) << text;
    EXPECT_NE(text.find(std::string(tier) + ": needs at least"), std::string::npos) << text;
    EXPECT_NE(text.find("short by 256 B"), std::string::npos) << text;
    EXPECT_EQ(text.find("moments"), std::string::npos) << text;
  }
}

TEST(EvaluateOnlyEngine, RefusesWhatNeedsMastersAndGoesOn) {
  const TempFolder folder;
  write_tiny_model(folder.path(), TinyFamily::kLlama);
  const EngineConfig config = evaluating(tiny_engine_config(Precision::kBF16));
  const auto engine = Engine::open(folder.path().string(), config);
  const uint64_t loss = loss_bits(*engine);
  const std::string name = engine->tensors().front().name;
  std::vector<float> values(61 * 32);
  const std::pair<const char*, std::function<void()>> calls[] = {
      {"step", [&] { engine->step(held_out(config)); }},
      {"save_checkpoint", [&] { engine->save_checkpoint((folder / "run").string(), "", 1); }},
      {"read_state", [&] { engine->read_state(name, StateKind::kMaster, values); }},
      {"read_state", [&] { engine->read_state(name, StateKind::kExpAvg, values); }}};
  for (const auto& [call, refused] : calls) {
    const std::string text = error_of(ErrorCode::kUsage, refused);
    EXPECT_NE(text.find(std::string(call) + ": the engine was opened to evaluate only"),
              std::string::npos)
        << text;
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "run"));
  engine->synchronize();
  EXPECT_EQ(loss_bits(*engine), loss);
  EngineConfig with_drives = config;
  with_drives.nvme.paths = {folder.path().string()};
  const std::string text =
      error_of(ErrorCode::kUsage, [&] { Engine::open(folder.path().string(), with_drives); });
  EXPECT_NE(text.find("nvme.paths names 1 directories"), std::string::npos) << text;
}

// A configuration that was made for training opens, too.
TEST(EvaluateOnlyEngine, PassesOverWhatConcernsUpdates) {
  const TempFolder folder;
  const std::string model = folder.path().string();
  write_tiny_model(folder.path(), TinyFamily::kLlama);
  EngineConfig config = tiny_engine_config(Precision::kBF16);
  config.optimizer.max_grad_norm = 0;
  config.optimizer.moments = DType::kBF16;
  config.placement.wave = 2;
  config.placement.activations = Tier::kHost;
  config.limits.snapshot_bytes = size_t{1} << 20;
  config.checkpoint_dir = (folder / "run").string();
  const uint64_t loss = loss_bits(*Engine::open(model, config));
  const auto engine = Engine::open(model, evaluating(config));
  EXPECT_EQ(loss_bits(*engine), loss);
  EXPECT_EQ(bytes_of(engine->plan(), Tier::kHost, "snapshot for saves"), 0u);
}

}  // namespace
}  // namespace orlop::test
