#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include "zero/step_plan_draft.h"

namespace orlop {

// What becomes of a FlatParam's gradient once it is complete: summed over ranks, rounded, brought
// to where the update runs, and used there, behind the global norm or at once. States on drives go
// through the swap slots, chunk by chunk.
class ParamUpdates {
 public:
  // Adds the swap slots.
  explicit ParamUpdates(StepPlanDraft& draft);

  // The fp32 gradient in buffer `grad` is complete.
  void take_gradient(int param, int grad);

  // What the last visit's reductions work on keeps its bytes until the operation that was emitted
  // last: the compute of this visit would otherwise wait for them before it could take these.
  void release_reductions();

  // Behind the last gradient: the global norm, and the updates that waited for it.
  void finish_step();

 private:
  struct ChunkOfParam {
    int param;
    StateChunk chunk;
  };

  struct AdamBuffers {
    int grad;
    int scalars;
    int states;
  };

  std::vector<int> update_order() const;
  size_t chunk_bytes(const ChunkOfParam& piece) const;
  int sum_over_ranks(int param, int grad);
  int round_grad(int param, int grad);
  void update_now(int param, int rounded);
  void keep_in_flight(int host_grad);
  void emit_update(int param, int grad, int scalars);
  PlanOp& emit_adam(OpKind kind, int param, const AdamBuffers& buffers);
  void swap_in_ahead();
  void update_chunk(int grad, int scalars);
  void emit_swap(OpKind kind, PlanLaneKind lane, size_t index);
  int slot_of(size_t chunk) const;

  StepPlanDraft& draft_;
  std::vector<ChunkOfParam> chunks_;  // on the drives, in the order of their updates
  size_t states_in_ = 0;              // chunks that have been swapped in
  size_t updated_ = 0;                // and updated
  std::deque<int> in_flight_;         // gradients in host memory, the oldest first
  std::vector<int> reduced_;          // buffers of the last visit's reductions
};

}  // namespace orlop
