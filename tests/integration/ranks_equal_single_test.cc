// Several ranks that share a model compute what one rank computes on the same global batch: within
// the rounding of sums in another order for another number of ranks, bit for bit for every
// placement and ZeRO stage at one number.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "tests/formats/support.h"
#include "tests/support/rank_run.h"
#include "tests/support/tiny_model.h"

namespace orlop::test {
namespace {

const std::vector<TinyFamily> kFamilies = {TinyFamily::kLlama, TinyFamily::kLlamaTied,
                                           TinyFamily::kQwen3, TinyFamily::kGpt2};

class RanksEqualSingle : public ::testing::TestWithParam<TinyFamily> {
 protected:
  RanksEqualSingle() { write_tiny_model(folder_.path(), GetParam()); }
  std::string model() const { return folder_.path().string(); }
  static size_t family_index() {
    return static_cast<size_t>(std::find(kFamilies.begin(), kFamilies.end(), GetParam()) -
                               kFamilies.begin());
  }

 private:
  TempFolder folder_;
};

// Without RoPE a key's bias adds the same to all scores of a query: its true gradient is zero, and
// Adam makes steps of the noise that is left of it.
States with_gradients(States states) {
  std::erase_if(states, [](const auto& state) {
    return state.first.find("attn.c_attn.bias") != std::string::npos;
  });
  return states;
}

// Cases D-09, D-12, and N-05: gradients of a step's micro-batches stay with their rank and cross
// once, which is the only way there is. The last step has one micro-batch less: with 2, 3 and 4
// ranks one of them does less than the others, so that the weight of every token must be that of
// all ranks.
TEST_P(RanksEqualSingle, InTheFirstTwentyLosses) {
  const EngineConfig config = rank_config(Precision::kF32);
  const auto engine = Engine::open(model(), config);
  EXPECT_EQ(engine->world_size(), 1);
  const RunRecord single = run(*engine, {});
  for (const int ranks : {1, 2, 3, 4}) {
    if (!is_tried(static_cast<size_t>(ranks), family_index(), kFamilies.size())) continue;
    const RunRecord found = run_on_ranks(ranks, model(), config, {});
    EXPECT_TRUE(close_losses(single, found)) << ranks << " ranks";
    EXPECT_TRUE(close_states(with_gradients(single.states), with_gradients(found.states)))
        << ranks << " ranks";
    if (ranks == 1) {
      EXPECT_TRUE(same_bits(single, found));
    }
  }
}

// What has a gradient moves, whichever rank has it and however the parts divide; an element in
// thirty may be back where it was by chance.
TEST_P(RanksEqualSingle, InWhatIsTrained) {
  const EngineConfig config = rank_config(Precision::kF32);
  const States before = read_states(*Engine::open(model(), config));
  for (const int ranks : {1, 3, 4}) {
    if (!is_tried(static_cast<size_t>(ranks), family_index(), kFamilies.size())) continue;
    const States after = run_on_ranks(ranks, model(), config, {.until = 3, .last = 3}).states;
    for (const auto& [name, masters] : before) {
      if (!name.ends_with(".master")) continue;
      const std::string tensor = name.substr(0, name.size() - std::string(".master").size());
      const std::vector<float>& moments = after.at(tensor + ".exp_avg");
      size_t with_gradient = 0;
      size_t moved = 0;
      for (size_t i = 0; i < masters.size(); ++i) {
        if (moments[i] == 0) continue;
        ++with_gradient;
        if (after.at(name)[i] != masters[i]) ++moved;
      }
      EXPECT_GT(with_gradient, masters.size() / 4) << name;
      EXPECT_GE(moved, with_gradient - (with_gradient + 31) / 32)
          << name << ", " << ranks << " ranks";
    }
  }
}

// Case N-17: without weight decay an element moves for its gradient alone, and by about the
// learning rate in the first step: every one that has a gradient with one rank has moved with four.
TEST_P(RanksEqualSingle, InEveryElementThatHasAGradient) {
  EngineConfig config = rank_config(Precision::kF32);
  config.optimizer.learning_rate = 1e-2;
  config.optimizer.weight_decay = 0;
  config.schedule.warmup_steps = 0;
  const auto engine = Engine::open(model(), config);
  const States before = read_states(*engine);
  const RunOptions one_step{.until = 1, .last = -1};
  const States single = run(*engine, one_step).states;
  const States after = run_on_ranks(4, model(), config, one_step).states;
  for (const auto& [name, gradients] : single) {
    if (!name.ends_with(".exp_avg")) continue;
    const std::string master =
        name.substr(0, name.size() - std::string("exp_avg").size()) + "master";
    size_t with_gradient = 0;
    size_t moved = 0;
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (gradients[i] == 0) continue;
      ++with_gradient;
      moved += after.at(master)[i] != before.at(master)[i] ? 1 : 0;
    }
    EXPECT_GT(with_gradient, gradients.size() / 4) << name;
    EXPECT_EQ(moved, with_gradient) << name;
  }
}

// Gradients are summed over ranks in fp32 and rounded once, as those of one rank are.
TEST(RanksInBf16, StayWithOneRankForFiftyLosses) {
  const TempFolder folder;
  write_tiny_model(folder.path(), TinyFamily::kLlamaTied);
  const EngineConfig config = rank_config(Precision::kBF16);
  const int64_t steps = kSanitized ? kRunSteps : 50;
  const RunOptions options{.until = steps, .last = steps};
  const RunRecord single = run_on_ranks(1, folder.path().string(), config, options);
  for (const int ranks : {2, 3}) {
    const RunRecord found = run_on_ranks(ranks, folder.path().string(), config, options);
    for (size_t i = 0; i < single.losses.size(); ++i) {
      ASSERT_NEAR(found.losses[i], single.losses[i], 1e-2 * single.losses[i]) << "step " << i + 1;
    }
  }
}

// Case D-03: a whole model whose every group has fewer elements than a part must have, so that most
// ranks have none of it; of eight ranks, most have no micro-batch either.
TEST(RanksWithoutElements, EqualOneRank) {
  for (const int64_t hidden : {1, 3, 7}) {
    const TempFolder folder;
    const TinyShape shape{.vocab = 5,
                          .hidden = hidden,
                          .layers = 1,
                          .heads = 1,
                          .kv_heads = 1,
                          .intermediate = hidden,
                          .positions = 48};
    write_tiny_model(folder.path(), TinyFamily::kGpt2, shape);
    EngineConfig config = rank_config(Precision::kF32);
    config.batch.accumulation_steps = 3;
    const RunOptions options{.vocab = shape.vocab, .until = 3, .last = 3};
    const RunRecord single = run_on_ranks(1, folder.path().string(), config, options);
    for (const int ranks : {2, 4, 8}) {
      const RunRecord found = run_on_ranks(ranks, folder.path().string(), config, options);
      EXPECT_TRUE(close_losses(single, found)) << ranks << " ranks, hidden " << hidden;
      EXPECT_TRUE(close_states(with_gradients(single.states), with_gradients(found.states)))
          << ranks << " ranks, hidden " << hidden;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, RanksEqualSingle, ::testing::ValuesIn(kFamilies),
                         [](const auto& info) { return family_name(info.param); });

struct Case {
  const char* name;
  TinyFamily family;
  Precision precision;
  DType moments;
  DType wire = DType::kF32;
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

const std::vector<Case> kCases = {
    {"fp32", TinyFamily::kLlama, Precision::kF32, DType::kF32},
    {"bf16", TinyFamily::kLlamaTied, Precision::kBF16, DType::kF32},
    {"bf16_rounded_moments", TinyFamily::kQwen3, Precision::kBF16, DType::kBF16},
    {"fp16", TinyFamily::kGpt2, Precision::kF16, DType::kF32},
    {"fp32_gradients_in_bf16", TinyFamily::kLlamaTied, Precision::kF32, DType::kF32, DType::kBF16},
    {"bf16_gradients_in_bf16", TinyFamily::kLlama, Precision::kBF16, DType::kF32, DType::kBF16}};

class RanksEqualEachOther : public ::testing::TestWithParam<Case> {
 protected:
  RanksEqualEachOther() {
    write_tiny_model(folder_.path(), GetParam().family);
    config_ = rank_config(GetParam().precision);
    config_.optimizer.learning_rate = 5e-3;
    config_.optimizer.moments = GetParam().moments;
    config_.gradient_wire = GetParam().wire;
  }
  std::string model() const { return folder_.path().string(); }

  static bool is_tried_here(size_t variant) {
    const auto found = std::find_if(kCases.begin(), kCases.end(), [](const Case& c) {
      return std::string_view(c.name) == GetParam().name;
    });
    return is_tried(variant, static_cast<size_t>(found - kCases.begin()), kCases.size());
  }

  EngineConfig config_;

 private:
  TempFolder folder_;
};

struct Variant {
  const char* name;
  std::function<void(EngineConfig&)> change;
  bool evaluate_between = false;
};

std::vector<Variant> variants() {
  return {{"stage 3", [](EngineConfig& c) { c.placement.resident_blocks = 0; }},
          {"stage 3, states on a drive that the ranks share",
           [](EngineConfig& c) {
             static const TempFolder folder;
             c.nvme.paths = {folder.path().string()};
             c.placement.resident_blocks = 1;
             c.placement.nvme_optimizer_blocks = 4;
             c.placement.nvme_param_blocks = 3;
             c.placement.nvme_optimizer_share = 0.6;
             c.placement.nvme_param_share = 0.5;
             c.placement.swap_chunk = 4096;
           }},
          {"stage 3, no prefetch, waves of one",
           [](EngineConfig& c) {
             c.placement.resident_blocks = 0;
             c.placement.prefetch_depth = 0;
             c.placement.wave = 1;
             c.placement.activations = Tier::kHost;
           }},
          {"between the stages, waves of two",
           [](EngineConfig& c) {
             c.placement.resident_blocks = 2;
             c.placement.prefetch_depth = 3;
             c.placement.wave = 2;
           }},
          {"stage 3, optimizer of 3 blocks on the device",
           [](EngineConfig& c) {
             c.placement.resident_blocks = 0;
             c.placement.device_optimizer_blocks = 3;
           }},
          {"stage 2, optimizer on the device",
           [](EngineConfig& c) {
             c.placement.resident_blocks = 5;
             c.placement.device_optimizer_blocks = 5;
           }},
          {"update beside the next forward", [](EngineConfig& c) { c.threads = 5; }},
          {"evaluation between steps", [](EngineConfig&) {}, true}};
}

// Case D-09.
TEST_P(RanksEqualEachOther, ForEveryStageAndPlacement) {
  const RunOptions options{.until = 6, .last = 6};
  for (const int ranks : {2, 3}) {
    EngineConfig config = config_;
    config.placement.resident_blocks = 5;  // stage 1 and 2: the whole weights stay on the device
    const RunRecord expected = run_on_ranks(ranks, model(), config, options);
    ASSERT_TRUE(std::isfinite(expected.losses.back()));
    EXPECT_LE(std::count(expected.skipped.begin(), expected.skipped.end(), true), 5) << "it trains";
    auto number = static_cast<size_t>(ranks);
    for (const Variant& variant : variants()) {
      if (!is_tried_here(number++)) continue;
      config = config_;
      variant.change(config);
      RunOptions run_options = options;
      run_options.evaluate_between = variant.evaluate_between;
      EXPECT_TRUE(same_bits(expected, run_on_ranks(ranks, model(), config, run_options)))
          << ranks << " ranks, " << variant.name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, RanksEqualEachOther, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

// A gradient that is not finite on one rank is every rank's: all skip the step, at the same scale,
// and name the same element.
TEST(RanksNonFinite, SkipTheSameSteps) {
  const TempFolder folder;
  const TinyShape shape;
  write_tiny_model(folder.path(), TinyFamily::kGpt2, shape,
                   [&](const std::string& name, std::vector<float>& values) {
                     if (name != "transformer.wpe.weight") return;
                     const auto row = values.begin() + 15 * shape.hidden;
                     std::fill(row, row + shape.hidden, 3e38f);
                   });
  const auto batches_of = [&](const EngineConfig& config, bool with_bad) {
    std::vector<MicroBatch> batches = random_batches(12, config.batch, 61, 3);
    for (MicroBatch& batch : batches) batch.cu_seqlens = {0, 8, 16};
    if (with_bad) batches[5].cu_seqlens = {0, 16};  // of one rank, whatever their number
    return batches;
  };
  for (const Precision precision : {Precision::kF16, Precision::kBF16}) {
    EngineConfig config = rank_config(precision);
    std::vector<StepResult> expected;
    const auto step_twice = [&](Engine& engine) {
      std::vector<StepResult> results;
      for (const bool bad : {true, false}) {
        results.push_back(
            engine.step(share_of(batches_of(config, bad), engine.rank(), engine.world_size())));
      }
      return results;
    };
    expected = step_twice(*Engine::open(folder.path().string(), config));
    ASSERT_TRUE(expected[0].skipped);
    ASSERT_FALSE(expected[1].skipped);
    for (const int ranks : {2, 3, 4}) {
      EngineConfig part = config;
      part.batch.accumulation_steps = 12 / ranks;
      run_engines(ranks, folder.path().string(), part, [&](Engine& engine) {
        const States before = read_states(engine);
        const std::vector<StepResult> found = step_twice(engine);
        for (size_t i = 0; i < 2; ++i) {
          EXPECT_EQ(found[i].skipped, expected[i].skipped);
          EXPECT_EQ(found[i].nonfinite, expected[i].nonfinite);
          EXPECT_EQ(found[i].loss_scale, expected[i].loss_scale);
        }
        EXPECT_EQ(found[1].step, 1);
        EXPECT_FALSE(same_states(before, read_states(engine)));
      });
    }
  }
}

}  // namespace
}  // namespace orlop::test
