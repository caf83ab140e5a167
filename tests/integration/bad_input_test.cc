// What users get wrong: one error that says where and what, and an engine that works on as if
// nothing had been asked.

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "formats/safetensors.h"
#include "formats/safetensors_writer.h"
#include "orlop/engine.h"
#include "tests/formats/support.h"
#include "tests/support/engine_run.h"
#include "tests/support/process.h"
#include "tests/support/tiny_model.h"

namespace orlop::test {
namespace {

namespace fs = std::filesystem;

void expect_parts(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
  }
}

// ---- config.json

struct BadModel {
  const char* name;
  std::function<void(const fs::path& folder)> damage;
  ErrorCode code;
  std::vector<std::string> parts;
};

std::ostream& operator<<(std::ostream& out, const BadModel& bad) { return out << bad.name; }

std::function<void(const fs::path&)> edit_config(std::function<void(nlohmann::json&)> edit) {
  return [edit = std::move(edit)](const fs::path& folder) {
    nlohmann::json config = nlohmann::json::parse(slurp(folder / "config.json"));
    edit(config);
    spill(folder / "config.json", config.dump());
  };
}

struct LoadedTensor {
  TensorSpec spec;
  std::vector<std::byte> bytes;
};

// Rewrites model.safetensors after `edit`.
std::function<void(const fs::path&)> edit_weights(
    std::function<void(std::vector<LoadedTensor>&)> edit) {
  return [edit = std::move(edit)](const fs::path& folder) {
    std::vector<LoadedTensor> tensors;
    {
      const SafetensorsReader reader(folder);
      for (const TensorInfo& info : reader.tensors()) {
        tensors.push_back(
            {{info.name, info.dtype, info.shape}, std::vector<std::byte>(info.bytes)});
        reader.read(info, 0, tensors.back().bytes);
      }
    }
    edit(tensors);
    std::vector<TensorSpec> specs;
    for (const LoadedTensor& tensor : tensors) specs.push_back(tensor.spec);
    SafetensorsWriter writer(folder / "model.safetensors", specs);
    for (const LoadedTensor& tensor : tensors) writer.write(tensor.spec.name, 0, tensor.bytes);
    writer.finish();
  };
}

LoadedTensor& named(std::vector<LoadedTensor>& tensors, const std::string& name) {
  return *std::find_if(tensors.begin(), tensors.end(),
                       [&](const LoadedTensor& tensor) { return tensor.spec.name == name; });
}

std::function<void(const fs::path&)> plant(const char* tensor, size_t element, float value) {
  return edit_weights([=](std::vector<LoadedTensor>& tensors) {
    reinterpret_cast<float*>(named(tensors, tensor).bytes.data())[element] = value;
  });
}

const char* const kDownProj = "model.layers.1.mlp.down_proj.weight";

std::vector<BadModel> bad_models() {
  constexpr ErrorCode kData = ErrorCode::kInvalidData;
  return {
      {"no_config",
       [](const fs::path& f) { fs::remove(f / "config.json"); },
       kData,
       {"config.json"}},
      {"missing_field",
       edit_config([](auto& c) { c.erase("hidden_size"); }),
       kData,
       {"config.json", "hidden_size"}},
      {"wrong_type",
       edit_config([](auto& c) { c["num_hidden_layers"] = "three"; }),
       kData,
       {"config.json", "num_hidden_layers", "three"}},
      {"unknown_model_type",
       edit_config([](auto& c) { c["model_type"] = "mamba"; }),
       kData,
       {"config.json", "mamba", "llama", "gpt2"}},
      {"dropout",
       edit_config([](auto& c) { c["attention_dropout"] = 0.1; }),
       kData,
       {"attention_dropout", "0.1"}},
      {"no_weights",
       [](const fs::path& f) { fs::remove(f / "model.safetensors"); },
       kData,
       {"model.safetensors"}},
      {"truncated",
       [](const fs::path& f) {
         fs::resize_file(f / "model.safetensors", fs::file_size(f / "model.safetensors") - 100);
       },
       kData,
       {"model.safetensors"}},
      {"cut_in_the_header",
       [](const fs::path& f) { fs::resize_file(f / "model.safetensors", 20); },
       kData,
       {"model.safetensors"}},
      {"missing_tensor",
       edit_weights([](auto& tensors) {
         std::erase_if(tensors, [](const LoadedTensor& t) { return t.spec.name == kDownProj; });
       }),
       kData,
       {kDownProj, "missing"}},
      {"unknown_tensor",
       edit_weights([](auto& tensors) {
         tensors.push_back(
             {{"model.layers.0.lora.weight", DType::kF32, {2}}, std::vector<std::byte>(8)});
       }),
       kData,
       {"model.safetensors", "model.layers.0.lora.weight"}},
      {"wrong_shape",
       edit_weights([](auto& tensors) {
         std::swap(named(tensors, kDownProj).spec.shape[0],
                   named(tensors, kDownProj).spec.shape[1]);
       }),
       kData,
       {"model.safetensors", kDownProj, "[48, 32]", "[32, 48]"}},
      {"wrong_dtype",
       edit_weights([](auto& tensors) { named(tensors, kDownProj).spec.dtype = DType::kI32; }),
       kData,
       {"model.safetensors", kDownProj, "I32"}},
      {"nan_weight",
       plant(kDownProj, 37, std::numeric_limits<float>::quiet_NaN()),
       kData,
       {"model.safetensors", kDownProj, "nan", "37"}},
      {"inf_weight",
       plant("model.norm.weight", 3, std::numeric_limits<float>::infinity()),
       kData,
       {"model.norm.weight", "inf", "3"}},
  };
}

class BadModelFolder : public ::testing::TestWithParam<BadModel> {};

TEST_P(BadModelFolder, IsRefused) {
  const TempFolder folder;
  write_tiny_model(folder.path(), TinyFamily::kLlama);
  GetParam().damage(folder.path());
  const std::string text = error_of(GetParam().code, [&] {
    Engine::open(folder.path().string(), tiny_engine_config(Precision::kBF16));
  });
  expect_parts(text, GetParam().parts);
}

INSTANTIATE_TEST_SUITE_P(, BadModelFolder, ::testing::ValuesIn(bad_models()),
                         [](const auto& info) { return info.param.name; });

// ---- EngineConfig

struct BadConfig {
  const char* name;
  std::function<void(EngineConfig&)> edit;
  std::vector<std::string> parts;
};

std::ostream& operator<<(std::ostream& out, const BadConfig& bad) { return out << bad.name; }

std::vector<BadConfig> bad_configs() {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  using C = EngineConfig;
  return {
      {"device", [](C& c) { c.device = "tpu"; }, {"tpu", "host", "cuda"}},
      {"micro_batch", [](C& c) { c.batch.micro_batch_size = 0; }, {"batch.micro_batch_size", "0"}},
      {"sequence", [](C& c) { c.batch.sequence_length = -1; }, {"batch.sequence_length", "-1"}},
      {"long_sequence",
       [](C& c) { c.batch.sequence_length = 49; },
       {"batch.sequence_length", "49", "48", "max_position_embeddings"}},
      {"accumulation",
       [](C& c) { c.batch.accumulation_steps = 0; },
       {"batch.accumulation_steps", "0"}},
      {"huge_batch",
       [](C& c) { c.batch.micro_batch_size = int64_t{1} << 40; },
       {"batch.micro_batch_size", "1099511627776"}},
      {"learning_rate",
       [=](C& c) { c.optimizer.learning_rate = nan; },
       {"optimizer.learning_rate", "nan"}},
      {"negative_rate",
       [](C& c) { c.optimizer.learning_rate = -1e-3; },
       {"optimizer.learning_rate", "-0.001"}},
      {"beta1", [](C& c) { c.optimizer.beta1 = 1.0; }, {"optimizer.beta1", "1"}},
      {"beta2", [](C& c) { c.optimizer.beta2 = -0.5; }, {"optimizer.beta2", "-0.5"}},
      {"eps", [](C& c) { c.optimizer.eps = -1e-8; }, {"optimizer.eps", "-1e-08"}},
      {"weight_decay",
       [=](C& c) { c.optimizer.weight_decay = nan; },
       {"optimizer.weight_decay", "nan"}},
      {"max_grad_norm",
       [](C& c) { c.optimizer.max_grad_norm = -1; },
       {"optimizer.max_grad_norm", "-1"}},
      {"moments", [](C& c) { c.optimizer.moments = DType::kF16; }, {"optimizer.moments", "F16"}},
      {"total_steps", [](C& c) { c.schedule.total_steps = 0; }, {"schedule.total_steps", "0"}},
      {"warmup", [](C& c) { c.schedule.warmup_steps = 41; }, {"schedule.warmup_steps", "41", "40"}},
      {"negative_warmup",
       [](C& c) { c.schedule.warmup_steps = -1; },
       {"schedule.warmup_steps", "-1"}},
      {"min_lr_ratio",
       [](C& c) { c.schedule.min_lr_ratio = 1.5; },
       {"schedule.min_lr_ratio", "1.5"}},
      {"decay_ratio", [](C& c) { c.schedule.decay_ratio = 2; }, {"schedule.decay_ratio", "2"}},
      {"wsd_overlap",
       [](C& c) {
         c.schedule.kind = ScheduleKind::kWsd;
         c.schedule.warmup_steps = 30;
         c.schedule.decay_ratio = 0.5;
       },
       {"schedule.warmup_steps", "30", "schedule.decay_ratio", "0.5"}},
      {"threads", [](C& c) { c.threads = -2; }, {"threads", "-2"}},
      {"max_skipped", [](C& c) { c.max_skipped_steps = 0; }, {"max_skipped_steps", "0"}},
      {"prefetch",
       [](C& c) { c.placement.prefetch_depth = 9; },
       {"placement.prefetch_depth", "9", "8"}},
      {"resident",
       [](C& c) { c.placement.resident_blocks = 6; },
       {"placement.resident_blocks", "6", "5"}},
      {"device_optimizer",
       [](C& c) { c.placement.device_optimizer_blocks = -1; },
       {"placement.device_optimizer_blocks", "-1"}},
      {"wave", [](C& c) { c.placement.wave = 4; }, {"placement.wave", "4", "3"}},
  };
}

class BadEngineConfig : public ::testing::TestWithParam<BadConfig> {};

TEST_P(BadEngineConfig, IsRefusedByPlanAndOpen) {
  const TempFolder folder;
  write_tiny_model(folder.path(), TinyFamily::kLlama);
  EngineConfig config = tiny_engine_config(Precision::kBF16);
  GetParam().edit(config);
  const std::string model = folder.path().string();
  const std::string text = error_of(ErrorCode::kUsage, [&] { Engine::plan(model, config); });
  expect_parts(text, GetParam().parts);
  EXPECT_EQ(error_of(ErrorCode::kUsage, [&] { Engine::open(model, config); }), text);
}

INSTANTIATE_TEST_SUITE_P(, BadEngineConfig, ::testing::ValuesIn(bad_configs()),
                         [](const auto& info) { return info.param.name; });

// Attention is causal over the whole sequence; a window that is shorter would have to cut it.
TEST(SlidingWindow, ShorterThanTheSequenceIsRefused) {
  const TempFolder folder;
  write_tiny_model(folder.path(), TinyFamily::kLlama);
  edit_config([](auto& c) {
    c["model_type"] = "mistral";
    c["sliding_window"] = 12;
  })(folder.path());
  const std::string text = error_of(ErrorCode::kUsage, [&] {
    Engine::open(folder.path().string(), tiny_engine_config(Precision::kBF16));
  });
  expect_parts(text, {"batch.sequence_length", "16", "sliding_window", "12"});
}

// ---- budgets

TEST(Budget, TooSmallNamesNeedBudgetAndShortageAndTakesNothing) {
  const TempFolder folder;
  TinyShape shape;
  shape.hidden = 256;
  shape.vocab = 20000;  // states of 60 MB and more
  spill(folder / "config.json", tiny_config(TinyFamily::kLlamaTied, shape));
  EngineConfig config = tiny_engine_config(Precision::kBF16);
  config.from_scratch = true;
  config.placement.resident_blocks = 0;
  const std::string model = folder.path().string();
  const PlanReport plan = Engine::plan(model, config);
  ASSERT_GT(plan.host_bytes, size_t{60} << 20);

  config.limits.host_bytes = plan.host_bytes / 2;
  const size_t resident = resident_bytes();
  std::string text = error_of(ErrorCode::kDoesNotFit, [&] { Engine::open(model, config); });
  expect_parts(text, {"host: needs at least", "budget", std::to_string(plan.host_bytes / 2),
                      "short by", "raise the host budget"});
  config.limits.host_bytes.reset();
  config.limits.device_bytes = plan.device_peak_bytes / 4;
  text = error_of(ErrorCode::kDoesNotFit, [&] { Engine::open(model, config); });
  expect_parts(text,
               {"device: needs at least", "budget", std::to_string(plan.device_peak_bytes / 4),
                "short by", "raise the device budget"});
  if (!kSanitized) {
    EXPECT_LT(resident_bytes(), resident + (size_t{8} << 20));
  }

  config.limits.device_bytes = 1000;
  text = error_of(ErrorCode::kDoesNotFit, [&] { Engine::open(model, config); });
  expect_parts(text, {"1000", "raise the device budget"});
}

// What the error asks for is enough, and one byte less is not.
TEST(Budget, TheNeedThatTheErrorNamesIsEnough) {
  const TempFolder folder;
  write_tiny_model(folder.path(), TinyFamily::kQwen3);
  EngineConfig config = tiny_engine_config(Precision::kBF16);
  const std::string model = folder.path().string();
  const size_t free_choice = Engine::plan(model, config).device_peak_bytes;
  for (config.limits.device_bytes = free_choice;;) {
    try {
      config.limits.device_bytes = Engine::plan(model, config).device_peak_bytes - 1;
    } catch (const Error& error) {
      const std::string text = error.what();
      const size_t open = text.find('(', text.find("device: needs at least"));
      const size_t need = std::stoull(text.substr(open + 1));
      EXPECT_GT(need, *config.limits.device_bytes);
      config.limits.device_bytes = need;
      EXPECT_EQ(Engine::plan(model, config).device_peak_bytes, need);
      run(*Engine::open(model, config), {.until = 1});
      return;
    }
  }
}

// ---- batches

struct BadBatch {
  const char* name;
  std::function<void(std::vector<MicroBatch>&)> edit;
  ErrorCode code;
  std::vector<std::string> parts;
};

std::vector<BadBatch> bad_batches() {
  constexpr ErrorCode kData = ErrorCode::kInvalidData;
  using B = std::vector<MicroBatch>;
  const auto bounds = [](std::vector<int32_t> cu_seqlens) {
    return [=](B& b) { b[1].cu_seqlens = cu_seqlens; };
  };
  return {
      {"token_beyond",
       [](B& b) { b[2].tokens[5] = 61; },
       kData,
       {"micro-batch 2", "61", "position 5"}},
      {"token_negative",
       [](B& b) { b[0].tokens[31] = -1; },
       kData,
       {"micro-batch 0", "-1", "position 31"}},
      {"label_beyond",
       [](B& b) { b[1].labels[7] = 1000; },
       kData,
       {"micro-batch 1", "label 1000", "position 7", "61"}},
      {"label_negative",
       [](B& b) { b[1].labels[7] = -1; },
       kData,
       {"micro-batch 1", "label -1", "-100"}},
      {"few_tokens", [](B& b) { b[1].tokens.pop_back(); }, kData, {"micro-batch 1", "31", "32"}},
      {"many_labels", [](B& b) { b[1].labels.push_back(0); }, kData, {"micro-batch 1", "33", "32"}},
      {"no_label",
       [](B& b) {
         for (MicroBatch& batch : b)
           std::fill(batch.labels.begin(), batch.labels.end(), kIgnoredLabel);
       },
       kData,
       {"label"}},
      {"bounds_begin", bounds({1, 16, 32}), kData, {"micro-batch 1", "cu_seqlens", "32"}},
      {"bounds_end", bounds({0, 16, 31}), kData, {"micro-batch 1", "cu_seqlens", "32"}},
      {"bounds_alone", bounds({0}), kData, {"micro-batch 1", "cu_seqlens", "32"}},
      {"empty_document", bounds({0, 16, 16, 32}), kData, {"micro-batch 1", "document 1", "0"}},
      {"falling_bounds", bounds({0, 16, 12, 28, 32}), kData, {"micro-batch 1", "document 1"}},
      {"bounds_beyond_the_end",
       bounds({0, 16, 32, 48, 64, 32}),
       kData,
       {"micro-batch 1", "document 2"}},
      {"bounds_far_below",
       bounds({0, 16, std::numeric_limits<int32_t>::min(), 32}),
       kData,
       {"micro-batch 1", "document 1"}},
      {"long_document", bounds({0, 17, 32}), kData, {"micro-batch 1", "document 0", "17", "16"}},
      {"no_batch", [](B& b) { b.clear(); }, ErrorCode::kUsage, {"0 micro-batches", "3"}},
      {"many_batches",
       [](B& b) { b.push_back(b[0]); },
       ErrorCode::kUsage,
       {"4 micro-batches", "3"}},
  };
}

TEST(BadBatches, AreRefusedAndChangeNoBit) {
  const TempFolder folder;
  write_tiny_model(folder.path(), TinyFamily::kLlama);
  const EngineConfig config = tiny_engine_config(Precision::kBF16);
  const RunRecord expected = run(*Engine::open(folder.path().string(), config), {.until = 3});

  const auto engine = Engine::open(folder.path().string(), config);
  run(*engine, {.until = 2});
  const States before = read_states(*engine);
  for (const BadBatch& bad : bad_batches()) {
    std::vector<MicroBatch> batches = batches_of_step(config, 61, 3);
    bad.edit(batches);
    SCOPED_TRACE(bad.name);
    expect_parts(error_of(bad.code, [&] { engine->step(batches); }), bad.parts);
    EXPECT_EQ(engine->steps_done(), 2);
    EXPECT_TRUE(same_states(before, read_states(*engine)));
  }
  const RunRecord third = run(*engine, {.from = 3, .until = 3});
  EXPECT_EQ(third.losses.back(), expected.losses.back());
  EXPECT_TRUE(same_states(expected.states, third.states));
}

TEST(BadBatches, AreRefusedByEvaluateToo) {
  const TempFolder folder;
  write_tiny_model(folder.path(), TinyFamily::kLlama);
  const EngineConfig config = tiny_engine_config(Precision::kBF16);
  const auto engine = Engine::open(folder.path().string(), config);
  std::vector<MicroBatch> batches = batches_of_step(config, 61, 1);
  const double expected = engine->evaluate(batches).loss;
  batches[2].tokens[0] = 61;
  expect_parts(error_of(ErrorCode::kInvalidData, [&] { engine->evaluate(batches); }), {"61"});
  EXPECT_EQ(engine->evaluate(batches_of_step(config, 61, 1)).loss, expected);
}

// ---- checkpoints

TEST(BadCheckpoint, OfAnotherModelOrDamagedIsRefusedAndChangesNoBit) {
  const TempFolder folder;
  const EngineConfig config = tiny_engine_config(Precision::kBF16);
  TinyShape larger;
  larger.intermediate = 64;
  write_tiny_model(folder / "model", TinyFamily::kLlama);
  write_tiny_model(folder / "larger", TinyFamily::kLlama, larger);
  write_tiny_model(folder / "biased", TinyFamily::kQwen2);
  const auto engine = Engine::open((folder / "model").string(), config);
  run(*engine, {.until = 1});
  const std::string own = engine->save_checkpoint((folder / "run").string(), "", 1);
  run(*engine, {.from = 2, .until = 2});
  const States before = read_states(*engine);

  for (const char* const other : {"larger", "biased"}) {
    const auto writer = Engine::open((folder / other).string(), config);
    const std::string foreign = writer->save_checkpoint((folder / "foreign").string(), "", 1);
    const std::string text =
        error_of(ErrorCode::kInvalidData, [&] { engine->load_checkpoint(foreign); });
    if (std::string(other) == "larger") {
      expect_parts(text, {"of another shape (27)", "model.layers.0.mlp.gate_proj.weight.master",
                          "[64, 32] instead of [48, 32]"});
    } else {
      expect_parts(text, {"unexpected (27)", "model.layers.0.self_attn.q_proj.bias.master"});
    }
    EXPECT_TRUE(same_states(before, read_states(*engine))) << other;
  }
  const auto biased = Engine::open((folder / "biased").string(), config);
  expect_parts(error_of(ErrorCode::kInvalidData, [&] { biased->load_checkpoint(own); }),
               {"missing (27)", "model.layers.0.self_attn.q_proj.bias.master"});
  EngineConfig other_flavour = config;
  other_flavour.optimizer.decoupled = false;
  const auto classic = Engine::open((folder / "model").string(), other_flavour);
  expect_parts(error_of(ErrorCode::kUsage, [&] { classic->load_checkpoint(own); }),
               {"written by AdamW", "optimizer.decoupled"});
  const fs::path states = fs::path(own) / "optim/rank-0.safetensors";
  std::string bytes = slurp(states);
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1);
  spill(states, bytes);
  const std::string text = error_of(ErrorCode::kInvalidData, [&] { engine->load_checkpoint(own); });
  expect_parts(text, {"rank-0.safetensors", "damaged"});
  error_of(ErrorCode::kInvalidData,
           [&] { engine->load_checkpoint((folder / "nowhere").string()); });
  EXPECT_TRUE(same_states(before, read_states(*engine)));
  EXPECT_EQ(engine->steps_done(), 2);
}

}  // namespace
}  // namespace orlop::test
