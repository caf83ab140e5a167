// What crosses the links in a step, how much of it and when.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "orlop/engine.h"
#include "tests/formats/support.h"
#include "tests/support/engine_run.h"
#include "tests/support/tiny_model.h"

namespace orlop::test {
namespace {

// Bytes up and down that the engine's step `step` moves.
struct Traffic {
  uint64_t up = 0;
  uint64_t down = 0;
  bool operator==(const Traffic&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Traffic& traffic) {
  return out << traffic.up << " B up and " << traffic.down << " B down";
}

Traffic traffic_of_step(Engine& engine, int64_t step) {
  const Stats before = engine.stats();
  engine.step(batches_of_step(engine.config(), 61, step));
  const Stats after = engine.stats();
  return {after.uploaded_bytes - before.uploaded_bytes,
          after.offloaded_bytes - before.offloaded_bytes};
}

// Device memory that the budget has more is used: weights stay there and are not brought up again.
TEST(Traffic, FallsWithEveryShareOfDeviceMemoryUntilWeightsStay) {
  const TempFolder folder;
  write_tiny_model(folder.path(), TinyFamily::kLlama, {.layers = 6});
  const std::string model = folder.path().string();
  EngineConfig config = tiny_engine_config(Precision::kBF16);
  config.placement.wave = 3;
  config.placement.activations = Tier::kHost;
  const size_t most = Engine::plan(model, config).device_peak_bytes;
  EngineConfig lean = config;
  lean.placement.resident_blocks = lean.placement.device_optimizer_blocks = 0;
  lean.placement.prefetch_depth = 0;
  const size_t least = Engine::plan(model, lean).device_peak_bytes;
  std::vector<Traffic> moved;
  std::vector<double> losses;
  for (size_t share = 0; share <= 5; ++share) {
    config.limits.device_bytes = least + (most - least) * share / 5;
    const auto engine = Engine::open(model, config);
    EXPECT_LE(engine->plan().device_peak_bytes, *config.limits.device_bytes);
    traffic_of_step(*engine, 1);
    moved.push_back(traffic_of_step(*engine, 2));
    losses.push_back(engine->step(batches_of_step(config, 61, 3)).loss);
    std::printf("%zu B of device memory: %d of %d blocks resident, %zu B up\n",
                *config.limits.device_bytes, engine->plan().resident_blocks, engine->plan().blocks,
                static_cast<size_t>(moved.back().up));
    EXPECT_LE(moved.back().up, moved.front().up) << share * 20 << " %";
    // A fast device may gain more from updates of its own than from another block's weights.
    if (test_device() == "host") {
      EXPECT_LE(moved.back().up, moved[share > 0 ? share - 1 : 0].up) << share * 20 << " %";
    }
    EXPECT_EQ(losses.back(), losses.front());
  }
  EXPECT_LT(3 * moved.back().up, 2 * moved.front().up);
}

// Evaluations between steps, some of them refused, leave nothing behind: the next step brings up
// and takes down what it does without them, not a byte more, and nothing is worth a warning.
TEST(Traffic, OfAStepIsTheSameAfterEvaluations) {
  const TempFolder folder;
  write_tiny_model(folder.path(), TinyFamily::kLlama);
  EngineConfig config = tiny_engine_config(Precision::kBF16);
  config.placement.resident_blocks = 2;
  config.placement.prefetch_depth = 2;
  config.placement.wave = 2;
  testing::internal::CaptureStderr();
  const auto undisturbed = Engine::open(folder.path().string(), config);
  const auto engine = Engine::open(folder.path().string(), config);
  for (int64_t step = 1; step <= 3; ++step) {
    const std::vector<MicroBatch> held_out = batches_of_step(config, 61, 100 + step);
    engine->evaluate(held_out);
    std::vector<MicroBatch> bad = held_out;
    bad.back().tokens[0] = 61;
    EXPECT_THROW(engine->evaluate(bad), Error);
    EXPECT_EQ(traffic_of_step(*engine, step), traffic_of_step(*undisturbed, step)) << step;
  }
  EXPECT_TRUE(same_states(read_states(*undisturbed), read_states(*engine)));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

struct Span {
  double begin = 0;
  double end = 0;
};

// The spans of each name on each queue of one step, in order: "offload: offload".
std::map<std::string, std::vector<Span>> trace_of_step(Engine& engine, int64_t step) {
  const TempFolder folder;
  const std::string path = (folder / "trace.json").string();
  engine.start_trace();
  engine.step(batches_of_step(engine.config(), 61, step));
  engine.synchronize();
  engine.write_trace(path);
  const nlohmann::json trace = nlohmann::json::parse(slurp(path));
  std::map<int, std::string> lanes;
  std::map<std::string, std::vector<Span>> spans;
  for (const nlohmann::json& event : trace.at("traceEvents")) {
    const int lane = event.at("tid");
    if (event.at("ph") == "M") {
      const std::string name = event.at("args").at("name");
      lanes[lane] = name.starts_with("gpu ") ? name.substr(4) : name;
    } else if (event.at("ph") == "X") {
      const double begin = event.at("ts");
      const double duration = event.at("dur");
      spans[lanes[lane] + ": " + event.at("name").get<std::string>()].push_back(
          {begin, begin + duration});
    }
  }
  for (auto& [name, of_name] : spans) {
    std::sort(of_name.begin(), of_name.end(),
              [](const Span& a, const Span& b) { return a.begin < b.begin; });
  }
  return spans;
}

// A machine that is busy elsewhere may be late in one step or another; what does not overlap by its
// order never does.
bool holds_in_a_step(const std::function<bool(int64_t step)>& holds) {
  for (int64_t step = 1; step <= 20; ++step) {
    if (holds(step)) return true;
  }
  return false;
}

EngineConfig overlapping_config(double max_grad_norm) {
  EngineConfig config = tiny_engine_config(Precision::kBF16);
  config.optimizer.max_grad_norm = max_grad_norm;
  config.schedule.total_steps = 100;
  config.placement.resident_blocks = config.placement.device_optimizer_blocks = 0;
  config.placement.prefetch_depth = 1;
  config.placement.wave = 3;
  config.placement.activations = Tier::kDevice;
  return config;
}

constexpr int kLayers = 6;

// A block's gradient is complete with its round_grad, and is on its way before the second block
// after it is.
TEST(Trace, GradientsLeaveWhileBackwardGoesOn) {
  const TempFolder folder;
  write_tiny_model(folder.path(), TinyFamily::kLlama, {.layers = kLayers});
  const auto engine = Engine::open(folder.path().string(), overlapping_config(1));
  const size_t blocks = kLayers + 2;
  EXPECT_TRUE(holds_in_a_step([&](int64_t step) {
    auto spans = trace_of_step(*engine, step);
    const std::vector<Span>& rounded = spans["compute: round_grad"];
    const std::vector<Span>& offloads = spans["offload: offload"];
    // Three losses come before, the norm comes behind: one copy for all tensors of a block.
    EXPECT_EQ(rounded.size(), blocks);
    EXPECT_EQ(offloads.size(), 3 + blocks + 1);
    if (rounded.size() != blocks || offloads.size() != 3 + blocks + 1) return true;
    size_t overlapping = 0;
    for (size_t i = 0; i + 2 < blocks; ++i) {
      EXPECT_GE(offloads[3 + i].begin, rounded[i].begin);
      overlapping += offloads[3 + i].begin < rounded[i + 2].begin ? 1 : 0;
    }
    return overlapping == blocks - 2;
  }));
}

// With clipping off a block is updated while backward works on those before it.
TEST(Trace, UpdatesRunWhileBackwardGoesOn) {
  const TempFolder folder;
  write_tiny_model(folder.path(), TinyFamily::kLlama, {.layers = kLayers});
  const auto engine = Engine::open(folder.path().string(), overlapping_config(0));
  EXPECT_TRUE(holds_in_a_step([&](int64_t step) {
    auto spans = trace_of_step(*engine, step);
    const std::vector<Span>& rounded = spans["compute: round_grad"];
    size_t early = 0;
    for (int block = 2; block < kLayers + 2; ++block) {
      const std::vector<Span>& update = spans["optimizer: adam " + std::to_string(block)];
      EXPECT_EQ(update.size(), 1u) << block;
      early += !update.empty() && update.front().begin < rounded.back().begin ? 1 : 0;
    }
    return early == kLayers;
  }));
}

}  // namespace
}  // namespace orlop::test
