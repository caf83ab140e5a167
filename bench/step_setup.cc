#include "bench/step_setup.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>

#include "base/bytes.h"
#include "base/check.h"
#include "engine/session.h"
#include "zero/param_states.h"

namespace orlop::bench {

std::string Options::get(const std::string& name, const std::string& fallback) const {
  const auto found = values.find(name);
  return found == values.end() ? fallback : found->second;
}

int64_t Options::number(const std::string& name, int64_t fallback) const {
  const auto found = values.find(name);
  return found == values.end() ? fallback : std::stoll(found->second);
}

Options parse_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    check(name.starts_with("--"), ErrorCode::kUsage, "'{}' is not an option", name);
    options.values[name.substr(2)] = argv[i + 1];
  }
  return options;
}

std::string shape_folder(const std::string& shape) {
  const std::map<std::string, std::string> shapes = {
      {"l3",
       R"("vocab_size":32000,"hidden_size":3072,"intermediate_size":8192,"num_hidden_layers":28,
              "num_attention_heads":24,"num_key_value_heads":8,"tie_word_embeddings":false)"},
      {"l7",
       R"("vocab_size":32000,"hidden_size":4096,"intermediate_size":11008,"num_hidden_layers":32,
              "num_attention_heads":32,"num_key_value_heads":32,"tie_word_embeddings":false)"},
      {"tiny",
       R"("vocab_size":256,"hidden_size":64,"intermediate_size":176,"num_hidden_layers":4,
              "num_attention_heads":4,"num_key_value_heads":2,"tie_word_embeddings":false)"},
      {"smollm2",
       R"("vocab_size":49152,"hidden_size":576,"intermediate_size":1536,"num_hidden_layers":30,
              "num_attention_heads":9,"num_key_value_heads":3,"tie_word_embeddings":true)"}};
  const auto found = shapes.find(shape);
  if (found == shapes.end()) return shape;
  const auto folder = std::filesystem::temp_directory_path() / ("orlop_shape_" + shape);
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "config.json")
      << "{\"model_type\":\"llama\",\"architectures\":[\"LlamaForCausalLM\"],\"hidden_act\":"
         "\"silu\","
         "\"max_position_embeddings\":8192,\"rms_norm_eps\":1e-5,\"rope_theta\":10000.0,"
      << found->second << "}\n";
  return folder.string();
}

EngineConfig make_config(const Options& options, int64_t tokens) {
  EngineConfig config;
  config.device = options.get("device", "auto");
  const std::string precision = options.get("precision", "bf16");
  config.precision = precision == "fp32"   ? Precision::kF32
                     : precision == "fp16" ? Precision::kF16
                                           : Precision::kBF16;
  if (options.get("grad-wire", "fp32") == "bf16") config.gradient_wire = DType::kBF16;
  config.batch.sequence_length = options.number("sequence", 2048);
  config.batch.micro_batch_size = options.number("micro-batch", 8);
  const int64_t micro_tokens = config.batch.sequence_length * config.batch.micro_batch_size;
  config.batch.accumulation_steps = std::max<int64_t>(1, tokens / micro_tokens);
  config.threads = static_cast<int>(options.number("threads", 0));
  config.from_scratch = true;
  config.schedule.kind = ScheduleKind::kConstant;
  config.optimizer.learning_rate = 1e-5;
  config.optimizer.max_grad_norm = std::stod(options.get("clip", "1"));
  if (options.has("device-mem")) {
    config.limits.device_bytes = parse_bytes(options.get("device-mem", ""), "--device-mem");
  }
  if (options.has("host-mem")) {
    config.limits.host_bytes = parse_bytes(options.get("host-mem", ""), "--host-mem");
  }
  if (options.has("resident"))
    config.placement.resident_blocks = static_cast<int>(options.number("resident", 0));
  if (options.has("device-optimizer")) {
    config.placement.device_optimizer_blocks =
        static_cast<int>(options.number("device-optimizer", 0));
  }
  if (options.has("prefetch"))
    config.placement.prefetch_depth = static_cast<int>(options.number("prefetch", 1));
  if (options.has("activations")) {
    const std::string home = options.get("activations", "");
    config.placement.activations = home == "device" ? Tier::kDevice
                                   : home == "nvme" ? Tier::kNvme
                                                    : Tier::kHost;
  }
  return config;
}

std::vector<MicroBatch> random_batches(const EngineConfig& config, int64_t vocab_size,
                                       uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_int_distribution<int32_t> token(0, static_cast<int32_t>(vocab_size) - 1);
  std::vector<MicroBatch> batches(static_cast<size_t>(config.batch.accumulation_steps));
  for (MicroBatch& batch : batches) {
    batch.tokens.resize(
        static_cast<size_t>(config.batch.micro_batch_size * config.batch.sequence_length));
    for (int32_t& id : batch.tokens) id = token(random);
    batch.labels.assign(batch.tokens.begin() + 1, batch.tokens.end());
    batch.labels.push_back(kIgnoredLabel);
  }
  return batches;
}

double gradient_bytes(const EngineConfig& config) {
  return static_cast<double>(dtype_bytes(compute_dtype(config.precision)));
}

double update_bytes(const EngineConfig& config) {
  const StatePlanes planes =
      state_planes(1, compute_dtype(config.precision), config.optimizer.moments);
  return static_cast<double>(2 * (planes.copy_bytes + planes.rest_bytes)) + gradient_bytes(config);
}

void print_row(const char* what, const Summary& seconds, double tokens, double flops) {
  fmt::print("{:44} {:8.4f} s (spread {:4.1f} %) {:9.0f} tok/s {:7.1f} TFLOP/s\n", what,
             seconds.median, 100 * seconds.spread(), tokens / seconds.median,
             flops / seconds.median / 1e12);
}

}  // namespace orlop::bench
