#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "orlop/export.h"
#include "orlop/types.h"

namespace orlop {

// Bytes of one purpose in one tier ("weights", "gradients", "workspace", ...).
struct PlanLine {
  Tier tier = Tier::kHost;
  std::string purpose;
  size_t bytes = 0;
};

// Time one queue is busy in a simulated step, and how long compute waits for it.
struct PlanLane {
  std::string queue;
  double busy_seconds = 0;
  double stall_seconds = 0;
};

// What a run will need and take, known before it starts. Memory is a promise that the run keeps;
// time is a prediction from measured bandwidths.
struct ORLOP_EXPORT PlanReport {
  std::string model;
  std::string device;
  bool evaluates_only = false;  // then a step is the evaluation of one micro-batch
  int64_t parameters = 0;
  int ranks = 1;                      // bytes and times are those of one of them
  DType gradient_wire = DType::kF32;  // what gradients travel as between them
  int64_t tokens_per_step = 0;        // of all ranks
  size_t device_peak_bytes = 0;
  size_t device_fixed_bytes = 0;  // of it context, libraries and matmul workspace
  size_t device_budget_bytes = 0;
  size_t host_bytes = 0;
  size_t host_budget_bytes = 0;
  size_t host_pinned_bytes = 0;  // of host_bytes, what a GPU copies from and to
  size_t nvme_bytes = 0;
  size_t nvme_budget_bytes = 0;
  size_t nvme_read_bytes = 0;     // per step
  size_t nvme_written_bytes = 0;  // likewise
  size_t state_bytes = 0;         // masters and moments of every parameter, or its weights alone
  std::vector<PlanLine> lines;
  int blocks = 0;
  int resident_blocks = 0;
  int device_optimizer_blocks = 0;
  int nvme_optimizer_blocks = 0;    // of whose states some are on drives
  int nvme_param_blocks = 0;        // likewise of their weights
  double nvme_optimizer_share = 0;  // of the masters and moments of all blocks, there
  double nvme_param_share = 0;      // likewise of the weights
  int prefetch_depth = 0;
  int waves = 1;
  Tier activations = Tier::kHost;    // block inputs between forward and backward
  bool updates_in_backward = false;  // clipping is off, and not fp16: no gradient waits for a norm
  double step_seconds = 0;           // predicted
  double compute_seconds = 0;        // of it, the compute queue alone
  double optimizer_seconds = 0;      // the host update alone
  double forward_flops = 0;          // of all micro-batches, one forward pass
  double matmul_flop_per_s = 0;      // of large matmuls, as measured here; 0: not measured
  size_t save_bytes = 0;             // of one checkpoint
  double save_seconds = 0;           // to write it
  double save_stall_seconds = 0;     // what a save in the background adds to the steps beside it
  std::vector<PlanLane> lanes;
  bool time_is_measured =
      false;            // false: from default bandwidths, not from `orlop doctor --measure`
  std::string profile;  // the file that holds them, if they are measured

  std::string to_text() const;  // the table that `orlop plan` prints
  std::string to_json() const;
};

}  // namespace orlop
