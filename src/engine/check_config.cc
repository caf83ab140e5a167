#include "engine/check_config.h"

#include <cmath>
#include <limits>

#include "base/check.h"
#include "nvme/chunk_checksum.h"
#include "nvme/io_backend.h"

namespace orlop {
namespace {

constexpr int64_t kMaxCount = std::numeric_limits<int32_t>::max();

void check_count(int64_t value, const char* field) {
  check(value >= 1 && value <= kMaxCount, ErrorCode::kUsage,
        "{} is {}; it must lie between 1 and {}", field, value, kMaxCount);
}

void check_not_negative(double value, const char* field, const char* hint = "") {
  check(std::isfinite(value) && value >= 0, ErrorCode::kUsage,
        "{} is {}; it must be a finite number of at least 0{}", field, value, hint);
}

void check_share(double value, const char* field) {
  check(value >= 0 && value <= 1, ErrorCode::kUsage, "{} is {}; it must lie between 0 and 1", field,
        value);
}

void check_batch(const BatchConfig& batch, const TransformerConfig& model) {
  check_count(batch.micro_batch_size, "batch.micro_batch_size");
  check_count(batch.sequence_length, "batch.sequence_length");
  check_count(batch.accumulation_steps, "batch.accumulation_steps");
  check_sequence_length(model, batch.sequence_length);
  check(batch.micro_batch_size <= kMaxCount / batch.sequence_length, ErrorCode::kUsage,
        "batch.micro_batch_size {} x batch.sequence_length {} exceeds {} tokens",
        batch.micro_batch_size, batch.sequence_length, kMaxCount);
}

void check_optimizer(const OptimizerConfig& optimizer) {
  const auto check_beta = [](double value, const char* field) {
    check(value >= 0 && value < 1, ErrorCode::kUsage, "{} is {}; it must lie in [0, 1)", field,
          value);
  };
  check_not_negative(optimizer.learning_rate, "optimizer.learning_rate");
  check_beta(optimizer.beta1, "optimizer.beta1");
  check_beta(optimizer.beta2, "optimizer.beta2");
  check_not_negative(optimizer.eps, "optimizer.eps");
  check_not_negative(optimizer.weight_decay, "optimizer.weight_decay");
  check_not_negative(optimizer.max_grad_norm, "optimizer.max_grad_norm",
                     " (0 switches clipping off)");
  check(optimizer.moments == DType::kF32 || optimizer.moments == DType::kBF16, ErrorCode::kUsage,
        "optimizer.moments is {}; it may be F32 or BF16", dtype_name(optimizer.moments));
}

void check_schedule(const ScheduleConfig& schedule) {
  check_count(schedule.total_steps, "schedule.total_steps");
  check_share(schedule.min_lr_ratio, "schedule.min_lr_ratio");
  check_share(schedule.decay_ratio, "schedule.decay_ratio");
  const bool ends = schedule.kind != ScheduleKind::kConstant;
  check(schedule.warmup_steps >= 0 && (!ends || schedule.warmup_steps <= schedule.total_steps),
        ErrorCode::kUsage,
        "schedule.warmup_steps is {}; it must lie between 0 and schedule.total_steps, {}",
        schedule.warmup_steps, schedule.total_steps);
  const double decay_steps = schedule.decay_ratio * static_cast<double>(schedule.total_steps);
  check(schedule.kind != ScheduleKind::kWsd ||
            std::floor(decay_steps) <=
                static_cast<double>(schedule.total_steps - schedule.warmup_steps),
        ErrorCode::kUsage,
        "schedule.warmup_steps {} and schedule.decay_ratio {} ({} steps) overlap in "
        "schedule.total_steps {}",
        schedule.warmup_steps, schedule.decay_ratio, decay_steps, schedule.total_steps);
}

void check_nvme(const EngineConfig& config) {
  const NvmeConfig& nvme = config.nvme;
  constexpr size_t kBlockMultiple = 4096;
  constexpr size_t kMaxBlock = size_t{1} << 30;
  check(nvme.block_bytes > 0 && nvme.block_bytes % kBlockMultiple == 0 &&
            nvme.block_bytes <= kMaxBlock,
        ErrorCode::kUsage, "nvme.block is {} bytes; it must be a multiple of {} up to {}",
        nvme.block_bytes, kBlockMultiple, kMaxBlock);
  check(nvme.queue_depth >= 1 && nvme.queue_depth <= 4096, ErrorCode::kUsage,
        "nvme.queue_depth is {}; it must lie between 1 and 4096", nvme.queue_depth);
  check(!config.evaluate_only || nvme.paths.empty(), ErrorCode::kUsage,
        "nvme.paths names {} directories; an engine that is opened to evaluate only "
        "(evaluate_only) has all weights in memory",
        nvme.paths.size());
  nvme::parse_io_engine(nvme.engine);
  nvme::parse_verify(nvme.verify);
  const PlacementConfig& placement = config.placement;
  const auto check_drives = [&](double wanted, const char* field) {
    check(wanted <= 0 || !nvme.paths.empty(), ErrorCode::kUsage,
          "placement.{} is {}, but no swap directory is given; name one with --nvme", field,
          wanted);
  };
  check_drives(placement.nvme_optimizer_blocks.value_or(0), "nvme_optimizer_blocks");
  check_drives(placement.nvme_param_blocks.value_or(0), "nvme_param_blocks");
  check_drives(placement.nvme_optimizer_share.value_or(0), "nvme_optimizer_share");
  check_drives(placement.nvme_param_share.value_or(0), "nvme_param_share");
  check(placement.activations != Tier::kNvme || !nvme.paths.empty(), ErrorCode::kUsage,
        "placement.activations is nvme, but no swap directory is given; name one with --nvme");
}

}  // namespace

void check_config(const EngineConfig& config, const TransformerConfig& model) {
  check_batch(config.batch, model);
  check_optimizer(config.optimizer);
  check_schedule(config.schedule);
  check_nvme(config);
  check(config.gradient_wire == DType::kF32 || config.gradient_wire == DType::kBF16,
        ErrorCode::kUsage, "gradient_wire is {}; it may be F32 or BF16",
        dtype_name(config.gradient_wire));
  check_count(config.max_skipped_steps, "max_skipped_steps");
  check_count(config.checkpoint_room, "checkpoint_room");
  check(config.threads >= 0, ErrorCode::kUsage,
        "threads is {}; it must be at least 1, or 0 for every core", config.threads);
}

}  // namespace orlop
