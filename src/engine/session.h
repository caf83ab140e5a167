#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/trace.h"
#include "comm/communicator.h"
#include "engine/backend_factory.h"
#include "engine/background_save.h"
#include "engine/executor.h"
#include "engine/state_store.h"
#include "engine/swap_space.h"
#include "memory/host_arena.h"
#include "optim/optimizer_queue.h"
#include "orlop/config.h"
#include "zero/placement_plan.h"

namespace orlop {

// In which the matmuls read weights and activations.
DType compute_dtype(Precision precision);

// Everything that is known before memory is taken.
struct Planning {
  TransformerConfig model;
  BackendChoice device;
  std::vector<std::unique_ptr<Block>> blocks;
  PlanInput input;
  Budgets budgets;
  HardwareProfile profile;
  PlannedStep planned;
  PlanReport report;
  int threads = 1;
};

// The ranks that a step is planned for.
struct PlanningRanks {
  int world_size = 1;
  int local = 1;                  // of them on this machine: they share its memory
  int threads = 0;                // for this one; 0: its share of the machine's
  Communicator* ranks = nullptr;  // null: a plan alone, by whoever is not one of them
};

// Reads config.json, makes the backend and plans. All ranks make the same plan, from the least
// budgets and the figures of rank 0. Throws Error(kDoesNotFit) and takes no big memory.
Planning make_planning(const std::string& model_dir, const EngineConfig& config,
                       const PlanningRanks& ranks, Tracer* tracer);

// The memory of a plan and what walks it: arenas of both tiers, states, gates, executor. States are
// zero until they are loaded.
class Session {
 public:
  Session(Planning planning, const EngineConfig& config, Communicator& ranks, Tracer* tracer);
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  const Planning& planning() const { return planning_; }
  const PlanInput& input() const { return planning_.input; }
  const ModelLayout& layout() const { return planning_.input.layout; }
  // What memory is laid out by.
  const StepPlan& main_plan() const { return planning_.planned.main(); }
  // No operations where the engine only evaluates.
  const StepPlan& train_plan() const { return planning_.planned.train; }
  const StepPlan& eval_plan() const { return planning_.planned.eval; }

  Backend& backend() { return *planning_.device.backend; }
  Executor& executor() { return *executor_; }
  const Executor& executor() const { return *executor_; }
  StateStore& states() { return *states_; }
  Communicator& ranks() { return ranks_; }
  BackgroundSave& save() { return *save_; }
  size_t host_bytes() const { return host_arena_.capacity_bytes(); }

  // Null when nothing is on a drive.
  SwapSpace* swap() { return swap_.get(); }
  const SwapSpace* swap() const { return swap_.get(); }

  // What the host updates in each step, in the plan's order.
  HostUpdates host_updates(uint64_t seed);

 private:
  ExecutorMemory take_memory();
  StateStore make_state_store(QueueKind down, size_t slot_from_end);
  void make_save(const ExecutorMemory& memory);
  void upload_rope(std::byte* device);
  void take_drives(const EngineConfig& config);
  UpdateOp update_op(const PlanOp& op, uint64_t seed) const;
  std::vector<UpdatePart> update_parts(const PlanOp& op, uint64_t seed) const;

  Communicator& ranks_;
  HostArena host_arena_;  // outlives the backend, which has it registered, and all transfers
  Planning planning_;
  StateMemory state_memory_;
  Tracer* tracer_;
  int64_t sequence_length_;
  std::vector<Gate> gates_;
  std::unique_ptr<SwapSpace> swap_;
  std::unique_ptr<StateStore> states_;
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<BackgroundSave> save_;
};

}  // namespace orlop
