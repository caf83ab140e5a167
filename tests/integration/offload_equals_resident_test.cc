// Placement, budget, prefetch, waves, threads and instruction sets change where bytes lie and when
// they move, never a bit of the result.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "formats/safetensors.h"
#include "nvme/drive_report.h"
#include "orlop/engine.h"
#include "tests/formats/support.h"
#include "tests/support/engine_run.h"
#include "tests/support/tiny_model.h"

namespace orlop::test {
namespace {

struct Variant {
  std::string name;
  std::function<void(EngineConfig&)> change;
  bool evaluate_between = false;
};

// The least device and host memory that `config` can run in, one tier at a time.
size_t least_device_bytes(const std::string& model, EngineConfig config) {
  config.placement = {.prefetch_depth = 0,
                      .resident_blocks = 0,
                      .device_optimizer_blocks = 0,
                      .activations = Tier::kHost,
                      .wave = 1};
  return Engine::plan(model, config).device_peak_bytes;
}

size_t least_host_bytes(const std::string& model, EngineConfig config) {
  config.placement.device_optimizer_blocks = 5;
  config.placement.activations = Tier::kDevice;
  config.placement.wave = static_cast<int>(config.batch.accumulation_steps);
  return Engine::plan(model, config).host_bytes;
}

std::vector<Variant> variants(const std::string& model) {
  std::vector<Variant> all;
  const auto add = [&](std::string name, std::function<void(EngineConfig&)> change) {
    all.push_back({std::move(name), std::move(change)});
  };
  add("least device",
      [model](EngineConfig& c) { c.limits.device_bytes = least_device_bytes(model, c); });
  for (const size_t percent : {3u, 8u, 15u}) {
    add("device budget +" + std::to_string(percent) + " %", [model, percent](EngineConfig& c) {
      const size_t least = least_device_bytes(model, c);
      c.limits.device_bytes = least + least * percent / 100;
    });
  }
  add("least host", [model](EngineConfig& c) {
    c.placement.device_optimizer_blocks = 5;
    c.placement.activations = Tier::kDevice;
    c.placement.wave = 3;
    c.limits.host_bytes = least_host_bytes(model, c);
  });
  for (const int depth : {0, 1, 2, 3, 4}) {
    add("prefetch " + std::to_string(depth), [depth](EngineConfig& c) {
      c.placement.prefetch_depth = depth;
      c.placement.resident_blocks = 0;
      c.placement.activations = depth % 2 == 1 ? Tier::kDevice : Tier::kHost;
      c.placement.wave = 1 + depth % 3;
    });
  }
  for (const int wave : {1, 2, 3}) {
    add("wave " + std::to_string(wave), [wave](EngineConfig& c) {
      c.placement.wave = wave;
      c.placement.resident_blocks = wave;
      c.placement.activations = Tier::kHost;
    });
  }
  for (const int blocks : {1, 3, 5}) {
    add("optimizer of " + std::to_string(blocks) + " blocks on the device",
        [blocks](EngineConfig& c) {
          c.placement.device_optimizer_blocks = blocks;
          c.placement.wave = 1 + blocks % 3;
        });
  }
  all.push_back({"evaluation between steps", [](EngineConfig&) {}, true});
  all.push_back({"evaluation between steps, least device",
                 [model](EngineConfig& c) { c.limits.device_bytes = least_device_bytes(model, c); },
                 true});
  return all;
}

struct Case {
  const char* name;
  TinyFamily family;
  Precision precision;
  DType moments;
  double max_grad_norm = 1;  // 0: updates inside backward, but not in fp16
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

const std::vector<Case> kCases = {
    {"fp32", TinyFamily::kLlama, Precision::kF32, DType::kF32},
    {"bf16", TinyFamily::kLlamaTied, Precision::kBF16, DType::kF32},
    {"bf16_rounded_moments", TinyFamily::kQwen3, Precision::kBF16, DType::kBF16},
    {"fp16", TinyFamily::kGpt2, Precision::kF16, DType::kF32},
    {"fp32_without_clipping", TinyFamily::kGpt2, Precision::kF32, DType::kF32, 0},
    {"bf16_without_clipping", TinyFamily::kLlama, Precision::kBF16, DType::kF32, 0},
    {"bf16_tied_without_clipping", TinyFamily::kLlamaTied, Precision::kBF16, DType::kBF16, 0},
    {"fp16_without_clipping", TinyFamily::kGpt2, Precision::kF16, DType::kF32, 0}};

class OffloadEqualsResident : public ::testing::TestWithParam<Case> {
 protected:
  OffloadEqualsResident() {
    write_tiny_model(folder_.path(), GetParam().family);
    config_ = tiny_engine_config(GetParam().precision);
    config_.optimizer.moments = GetParam().moments;
    config_.optimizer.max_grad_norm = GetParam().max_grad_norm;
  }

  std::string model() const { return folder_.path().string(); }

  static bool is_tried_here(size_t variant) {
    const auto found = std::find_if(kCases.begin(), kCases.end(), [](const Case& c) {
      return std::string_view(c.name) == GetParam().name;
    });
    return is_tried(variant, static_cast<size_t>(found - kCases.begin()), kCases.size());
  }

  RunRecord run_with(const EngineConfig& config, bool evaluate_between = false) const {
    const auto engine = Engine::open(model(), config);
    return run(*engine, {.evaluate_between = evaluate_between});
  }

  EngineConfig config_;

 private:
  TempFolder folder_;
};

TEST_P(OffloadEqualsResident, ForEveryPlacementAndBudget) {
  EngineConfig resident = config_;
  resident.placement.resident_blocks = 5;
  resident.placement.activations = Tier::kDevice;
  resident.placement.wave = 3;
  const RunRecord expected = run_with(resident);
  ASSERT_TRUE(std::isfinite(expected.losses.back()));
  EXPECT_LE(std::count(expected.skipped.begin(), expected.skipped.end(), true), 5) << "it trains";
  size_t number = 0;
  for (const Variant& variant : variants(model())) {
    if (!is_tried_here(number++)) continue;
    EngineConfig config = config_;
    variant.change(config);
    EXPECT_TRUE(same_bits(expected, run_with(config, variant.evaluate_between))) << variant.name;
  }
}

INSTANTIATE_TEST_SUITE_P(, OffloadEqualsResident, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

// Where no gradient is clipped, waiting for the norm or not makes no difference either.
TEST(UpdatesInBackward, AreThoseThatWaitForANormThatClipsNothing) {
  const TempFolder folder;
  write_tiny_model(folder.path(), TinyFamily::kLlamaTied);
  const auto run_with = [&](double max_grad_norm, Precision precision) {
    EngineConfig config = tiny_engine_config(precision);
    config.optimizer.max_grad_norm = max_grad_norm;
    const auto engine = Engine::open(folder.path().string(), config);
    EXPECT_EQ(engine->plan().updates_in_backward, max_grad_norm == 0);
    return run(*engine, {});
  };
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    EXPECT_TRUE(same_bits(run_with(1e30, precision), run_with(0, precision)));
  }
}

// Cases S-17 and S-18, of the engine: shares of the optimizer states and of the weights on drives:
// none, all, and some of the chunks of every block or of the last ones.
TEST_P(OffloadEqualsResident, ForEveryShareOnDrives) {
  const RunRecord expected = run_with(config_);
  config_.placement.swap_chunk = 4096;  // far less than a FlatParam has
  struct Share {
    int states;
    int weights;
    double of_states = 1;
    double of_weights = 1;
  };
  size_t number = 0;
  for (const std::string& parent : {std::string("/dev/shm"), ::testing::TempDir()}) {
    for (const std::string engine : {"io_uring", "threads"}) {
      if (engine == "io_uring" && report_io().engine != engine) continue;
      for (const int drives : {1, 3}) {
        for (const Share share :
             {Share{5, 0}, Share{5, 5}, Share{5, 5, 0.37, 0.37}, Share{3, 2, 0.75, 0.37}}) {
          if (!is_tried_here(number++)) continue;
          std::vector<std::unique_ptr<TempFolder>> folders;
          EngineConfig config = config_;
          for (int drive = 0; drive < drives; ++drive) {
            folders.push_back(std::make_unique<TempFolder>(parent));
            config.nvme.paths.push_back(folders.back()->path().string());
          }
          config.nvme.engine = engine;
          config.placement.nvme_optimizer_blocks = share.states;
          config.placement.nvme_param_blocks = share.weights;
          config.placement.nvme_optimizer_share = share.of_states;
          config.placement.nvme_param_share = share.of_weights;
          // On one drive the weights pass through host memory in both directions of the step.
          if (drives == 1) config.placement.resident_blocks = 0;
          config.placement.prefetch_depth = share.weights % 3;
          config.placement.wave = 1 + share.states % 3;
          EXPECT_TRUE(same_bits(expected, run_with(config, drives == 3)))
              << share.of_states << " of " << share.states << " blocks of states, "
              << share.of_weights << " of " << share.weights << " of weights on " << drives
              << " drives in " << parent << " through " << engine;
        }
      }
    }
  }
}

// Block inputs of waves of every length, alone, and beside states on the same drives. The last step
// lacks a micro-batch.
TEST_P(OffloadEqualsResident, ForBlockInputsOnDrives) {
  const RunRecord expected = run_with(config_);
  config_.placement.swap_chunk = 4096;
  config_.placement.activations = Tier::kNvme;
  for (const std::string engine : {"io_uring", "threads"}) {
    if (engine == "io_uring" && report_io().engine != engine) continue;
    for (const int wave : {1, 2, 3}) {
      const TempFolder folder(wave == 2 ? "/dev/shm" : ::testing::TempDir());
      EngineConfig config = config_;
      config.nvme.paths = {folder.path().string()};
      config.nvme.engine = engine;
      config.placement.wave = wave;
      config.placement.prefetch_depth = wave % 3;
      if (wave != 2) config.placement.resident_blocks = 0;
      config.placement.nvme_optimizer_blocks = wave == 1 ? 0 : 5;
      config.placement.nvme_param_blocks = wave == 3 ? 4 : 0;
      config.placement.nvme_optimizer_share = 0.75;
      config.placement.nvme_param_share = 0.5;
      const auto opened = Engine::open(model(), config);
      EXPECT_EQ(opened->plan().activations, Tier::kNvme);
      EXPECT_TRUE(same_bits(expected, run(*opened, {.evaluate_between = wave == 2})))
          << "waves of " << wave << " through " << engine;
      EXPECT_GE(opened->stats().nvme_read_bytes,
                static_cast<size_t>(kRunSteps - 1) * opened->plan().nvme_read_bytes);
    }
  }
}

TEST_P(OffloadEqualsResident, InWhatIsExported) {
  const TempFolder out;
  std::string expected;
  for (const int blocks : {0, 5}) {
    config_.placement.device_optimizer_blocks = blocks;
    const auto engine = Engine::open(model(), config_);
    run(*engine, {.until = 2});
    const std::string folder = (out / std::to_string(blocks)).string();
    engine->export_hf(folder);
    const std::string weights = slurp(folder + "/model.safetensors");
    if (blocks == 0) expected = weights;
    EXPECT_TRUE(weights == expected) << weights.size() << " bytes";
    EXPECT_EQ(slurp(folder + "/config.json"), slurp(model() + "/config.json"));
    // What is exported are the compute copies; those on the device, which an evaluation uses, are
    // the same.
    const std::vector<MicroBatch> batches = batches_of_step(config_, 61, 9);
    EXPECT_EQ(Engine::open(folder, config_)->evaluate(batches).loss, engine->evaluate(batches).loss)
        << blocks << " blocks on the device";
  }
}

// Budgets that leave nothing but the drives: the planner puts block inputs there, but for those
// that there is room for.
TEST(BlockInputs, GoToTheDrivesWhereNothingElseFits) {
  const TempFolder folder;
  write_tiny_model(folder / "model", TinyFamily::kLlama);
  const std::string model = (folder / "model").string();
  EngineConfig config = tiny_engine_config(Precision::kBF16);
  config.batch.micro_batch_size = 64;
  const RunOptions options{.until = 5};
  const RunRecord expected = run(*Engine::open(model, config), options);
  config.nvme.paths = {(folder / "swap").string()};
  config.placement.wave = 3;
  config.placement.swap_chunk = 4096;
  EngineConfig least = config;
  least.placement.resident_blocks = 0;
  least.placement.prefetch_depth = 0;
  least.placement.activations = Tier::kNvme;
  least.placement.nvme_optimizer_share = least.placement.nvme_param_share = 1;
  const PlanReport plan = Engine::plan(model, least);
  config.limits.device_bytes = plan.device_peak_bytes;
  config.limits.host_bytes = plan.host_bytes + plan.host_bytes / 4;
  const auto engine = Engine::open(model, config);
  EXPECT_EQ(engine->plan().activations, Tier::kNvme);
  EXPECT_LE(engine->plan().host_bytes, *config.limits.host_bytes);
  EXPECT_LT(engine->plan().nvme_bytes, plan.nvme_bytes) << "some of what is told there stays";
  EXPECT_TRUE(same_bits(expected, run(*engine, options)));
}

// What is tied is told by the config, never by equal bytes, and is written once.
TEST(Export, TiesWhatTheConfigTiesAndNothingElse) {
  const TempFolder folder;
  std::vector<float> table;
  write_tiny_model(folder / "equal", TinyFamily::kLlama, {},
                   [&](const std::string& name, std::vector<float>& values) {
                     if (name == "model.embed_tokens.weight") table = values;
                     if (name == "lm_head.weight") values = table;
                   });
  write_tiny_model(folder / "tied", TinyFamily::kLlamaTied);
  const EngineConfig config = tiny_engine_config(Precision::kF32);
  for (const std::string name : {"equal", "tied"}) {
    const auto engine = Engine::open((folder / name).string(), config);
    run(*engine, {.until = 2});
    const std::string out = (folder / (name + "-hf")).string();
    engine->export_hf(out);
    const SafetensorsReader reader(out);
    EXPECT_EQ(reader.find("lm_head.weight") != nullptr, name == "equal") << name;
    EXPECT_EQ(reader.tensors().size(), engine->tensors().size());
    const auto again = Engine::open(out, config);
    const std::vector<MicroBatch> batches = batches_of_step(config, 61, 9);
    EXPECT_EQ(again->evaluate(batches).loss, engine->evaluate(batches).loss) << name;
    if (name == "tied") continue;
    const States states = read_states(*again);
    EXPECT_NE(states.at("lm_head.weight.master"), states.at("model.embed_tokens.weight.master"));
  }
}

// From five threads on the update runs beside the next forward.
TEST_P(OffloadEqualsResident, ForEveryThreadCount) {
  config_.batch.accumulation_steps = 1;
  const RunOptions options{.until = 5};
  const auto run_with_threads = [&](int threads, int prefetch) {
    config_.threads = threads;
    config_.placement.prefetch_depth = prefetch;
    const auto engine = Engine::open(model(), config_);
    return run(*engine, options);
  };
  const RunRecord expected = run_with_threads(1, 0);
  for (const int threads : {2, 3, 4, 5, 6}) {
    EXPECT_TRUE(same_bits(expected, run_with_threads(threads, threads % 3)))
        << threads << " threads";
  }
}

class SetIsa {
 public:
  explicit SetIsa(const char* isa) { ::setenv("ORLOP_MAX_ISA", isa, 1); }
  ~SetIsa() { ::unsetenv("ORLOP_MAX_ISA"); }
};

// Matmuls of oneDNN may differ between instruction sets; everything else may not.
TEST(InstructionSets, GiveTheSameBits) {
  if (test_device() != "host") GTEST_SKIP() << "of the host's arithmetic";
  const TempFolder folder;
  write_tiny_model(folder.path(), TinyFamily::kQwen2);
  EngineConfig config = tiny_engine_config(Precision::kBF16);
  config.reference_ops = true;
  config.optimizer.moments = DType::kBF16;
  const RunOptions options{.until = 8, .last = 8};
  const auto run_under = [&](const char* isa) {
    const SetIsa set(isa);
    const auto engine = Engine::open(folder.path().string(), config);
    return run(*engine, options);
  };
  const RunRecord expected = run_under("scalar");
  EXPECT_TRUE(same_bits(expected, run_under("avx2")));
  EXPECT_TRUE(same_bits(expected, run_under("avx512")));
  config.placement.device_optimizer_blocks = 2;
  EXPECT_TRUE(same_bits(expected, run_under("avx512")));
}

// The sum of equal micro-batches is kept in fp32: their mean is the gradient of one, though a sum
// in bf16 would have lost every addend behind the first few.
TEST(Accumulation, OfManyEqualMicroBatchesInBf16KeepsEveryOne) {
  const TempFolder folder;
  write_tiny_model(folder.path(), TinyFamily::kLlama);
  EngineConfig config = tiny_engine_config(Precision::kBF16);
  const MicroBatch batch = random_batches(1, config.batch, 61, 3).front();
  for (const int resident : {0, 5}) {
    config.placement.resident_blocks = resident;
    const auto norm_of = [&](int64_t count) {
      config.batch.accumulation_steps = count;
      const std::vector<MicroBatch> batches(static_cast<size_t>(count), batch);
      return Engine::open(folder.path().string(), config)->step(batches).grad_norm;
    };
    const double one = norm_of(1);
    EXPECT_NEAR(norm_of(64), one, 1e-5 * one) << resident << " blocks resident";
  }
}

// One batch of eight rows, cut into micro-batches in four ways: only the order of summation
// differs.
TEST(Accumulation, DoesNotDependOnTheMicroBatch) {
  const TempFolder folder;
  write_tiny_model(folder.path(), TinyFamily::kLlama);
  EngineConfig config = tiny_engine_config(Precision::kF32);
  config.batch = {.micro_batch_size = 8, .sequence_length = 16, .accumulation_steps = 1};
  config.optimizer.max_grad_norm = 0.5;
  MicroBatch whole = random_batches(1, config.batch, 61, 3).front();
  whole.cu_seqlens.clear();  // every row is a document

  const auto first_step = [&](int64_t rows) {
    config.batch.micro_batch_size = rows;
    config.batch.accumulation_steps = 8 / rows;
    std::vector<MicroBatch> batches;
    for (int64_t begin = 0; begin < 8; begin += rows) {
      const auto cut = [&](const std::vector<int32_t>& all) {
        return std::vector<int32_t>(all.begin() + begin * 16, all.begin() + (begin + rows) * 16);
      };
      batches.push_back({cut(whole.tokens), cut(whole.labels), {}});
    }
    const auto engine = Engine::open(folder.path().string(), config);
    const StepResult result = engine->step(batches);
    return std::pair(result, read_states(*engine));
  };

  const auto [expected, states] = first_step(8);
  EXPECT_GT(expected.grad_norm, 0.0);
  for (const int64_t rows : {4, 2, 1}) {
    const auto [result, found] = first_step(rows);
    EXPECT_NEAR(result.loss, expected.loss, 1e-6 * expected.loss) << rows;
    EXPECT_NEAR(result.grad_norm, expected.grad_norm, 1e-6 * expected.grad_norm) << rows;
    // After one step exp_avg is (1 - beta1) times the clipped gradient.
    for (const auto& [name, values] : states) {
      if (!name.ends_with(".exp_avg")) continue;
      double difference = 0;
      double norm = 0;
      for (size_t i = 0; i < values.size(); ++i) {
        difference += std::pow(static_cast<double>(found.at(name)[i]) - values[i], 2);
        norm += std::pow(static_cast<double>(values[i]), 2);
      }
      EXPECT_LE(std::sqrt(difference), 1e-6 * std::sqrt(norm))
          << name << ", micro-batches of " << rows;
    }
  }
}

}  // namespace
}  // namespace orlop::test
