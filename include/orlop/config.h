#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "orlop/types.h"

namespace orlop {

enum class Precision : uint8_t { kF32, kBF16, kF16 };

// AdamW (Loshchilov & Hutter 2019) as torch.optim.AdamW computes it; Adam with L2 when not
// decoupled.
struct OptimizerConfig {
  double learning_rate = 2e-5;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;  // not applied to norms and biases
  bool decoupled = true;
  DType moments = DType::kF32;  // kF32, or kBF16 with stochastic rounding
  // Global norm; 0 switches clipping off. Without it, in bf16 and fp32, every block is updated
  // inside backward, as soon as its gradient is there, and gradients take no memory that lasts. A
  // gradient that is not finite then leaves its own block as it is; with clipping, and in fp16, it
  // leaves all of them.
  double max_grad_norm = 1.0;
};

enum class ScheduleKind : uint8_t { kConstant, kLinear, kCosine, kWsd };

struct ScheduleConfig {
  ScheduleKind kind = ScheduleKind::kCosine;
  int64_t warmup_steps = 0;
  int64_t total_steps = 1000;
  double min_lr_ratio = 0.0;  // final rate over peak rate
  double decay_ratio = 0.1;   // kWsd: share of total_steps that decays at the end
};

struct BatchConfig {
  int64_t micro_batch_size = 1;    // sequences per micro-batch
  int64_t sequence_length = 512;   // tokens per sequence
  int64_t accumulation_steps = 1;  // micro-batches per optimizer step
};

// Hard budgets. Absent: all free device memory; all host memory the cgroup allows, less a reserve;
// all space that is free in the swap directories, less a reserve.
struct LimitsConfig {
  std::optional<size_t> device_bytes;
  std::optional<size_t> host_bytes;
  std::optional<size_t> nvme_bytes;
  // Wear: a step with which the ranks of one machine would write more than this to its drives since
  // midnight UTC is refused, on all ranks.
  std::optional<uint64_t> nvme_writes_per_day_bytes;
  // Of the host bytes, for copies of states that a save in the background makes so that updates
  // need not wait until they are written.
  size_t snapshot_bytes = 0;
};

// Where states are swapped to that host memory does not hold.
struct NvmeConfig {
  std::vector<std::string> paths;        // directories, one per drive; empty: nothing is swapped
  size_t block_bytes = size_t{1} << 20;  // of one request; a multiple of 4096
  int queue_depth = 32;                  // requests in flight
  bool direct = true;                    // O_DIRECT where the file system takes it
  std::string engine = "auto";           // auto, io_uring, threads
  std::string verify = "sample";         // checksums of what is read: off, sample, full
};

// What the planner decides by itself unless it is told.
struct PlacementConfig {
  std::optional<int> prefetch_depth = {};   // blocks uploaded ahead of compute, 0..8
  std::optional<int> resident_blocks = {};  // blocks whose weights stay on the device
  std::optional<int> device_optimizer_blocks =
      {};                                // blocks whose optimizer states live on the device
  std::optional<Tier> activations = {};  // block inputs: device, pinned host memory, or drives
  std::optional<int> wave = {};          // micro-batches per wave
  // Last blocks whose optimizer states are on drives, and whose weights are there, too; and the
  // share of each of those blocks, in whole chunks, that is. A share alone is one of every block.
  std::optional<int> nvme_optimizer_blocks = {};
  std::optional<int> nvme_param_blocks = {};
  std::optional<double> nvme_optimizer_share = {};  // 0..1
  std::optional<double> nvme_param_share = {};      // at most that of the optimizer states
  std::optional<int64_t> swap_chunk = {};  // elements that are swapped and updated together
};

struct EngineConfig {
  std::string device = "auto";  // auto, host, cuda, cuda:N
  Precision precision = Precision::kBF16;
  // What gradients travel as between ranks: kF32, or kBF16, half the bytes. Then every rank rounds
  // its contribution once, and they are added in fp32 in the order of ranks.
  DType gradient_wire = DType::kF32;
  BatchConfig batch;
  OptimizerConfig optimizer;
  ScheduleConfig schedule;
  LimitsConfig limits;
  NvmeConfig nvme;
  PlacementConfig placement;
  int threads = 0;             // host threads for compute and optimizer; 0: every usable core
  bool reference_ops = false;  // host device only: plain loops instead of oneDNN
  int max_skipped_steps = 10;  // this many steps in a row with a gradient not finite end the run
  bool from_scratch = false;   // random weights, normal(0, 0.02), instead of the folder's
  // The engine is for evaluate() and export_hf(): of every parameter it keeps the weight in
  // `precision` alone, no master, moment or gradient. All of them are in memory: nvme.paths must be
  // empty. Blocks with their optimizer on the device are those whose weights live there and nowhere
  // else; what else concerns updates is passed over.
  bool evaluate_only = false;
  uint64_t seed = 0;           // random weights and stochastic rounding
  std::string checkpoint_dir;  // where checkpoints will go: room for them is checked at the start
  int checkpoint_room = 1;     // for so many beside those that are there
};

}  // namespace orlop
