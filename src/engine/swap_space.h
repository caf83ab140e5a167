#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "nvme/swapper.h"
#include "optim/optimizer_queue.h"
#include "orlop/config.h"
#include "zero/param_states.h"
#include "zero/step_plan.h"

namespace orlop {

// Whose swap files they are.
struct SwapOwner {
  int rank = 0;
  std::string run_id;  // the same on all ranks of a run
};

// The options of a swapper that a configuration tells: all but its chunks and whose it is.
nvme::SwapperOptions swapper_options(const NvmeConfig& nvme);

// Of the files of one more owner in this process that is no rank of an engine: several may have
// theirs in one directory.
int next_swap_owner();

// Throws unless `swapper` moves memory of which every kDriveAlignment may be the start.
void check_alignment(const nvme::Swapper& swapper);

// What of a plan's states, of this rank's part, lies on drives: the chunks of every FlatParam, of
// which the first may stay in host memory, and the block inputs that wait there for backward; the
// swapper that moves them, and the version of each FlatParam there.
//
// A chunk is up to two transfers, which a slot holds one behind the other, each padded to
// kDriveAlignment: the compute copy, where that is on the drives too, and all other planes side by
// side.
class SwapSpace {
 public:
  // Takes the space on the drives for the states of `placement` and the block inputs of `train`;
  // all three outlive it. Throws Error(kDoesNotFit) with the bytes missing, and as Swapper does.
  SwapSpace(const PlanInput& input, const PlacementPlan& placement, const StepPlan& train,
            const EngineConfig& config, const SwapOwner& owner);

  nvme::Swapper& swapper() { return *swapper_; }
  const nvme::Swapper& swapper() const { return *swapper_; }
  std::vector<int64_t>& versions() { return versions_; }
  uint64_t bytes_written_per_step() const { return bytes_per_step_; }

  const std::vector<StateChunk>& chunks(int param) const {
    return chunks_[static_cast<size_t>(param)];
  }
  bool is_on_nvme(int param, const StateChunk& chunk) const {
    return placement_.states_are_on_nvme(param, chunk);
  }
  // Of the compute copy the first elements that are at home in host memory.
  int64_t host_copy_numel(int param) const {
    return placement_.host_copy_numel(param, input_.shard_numel(param));
  }

  // The transfers of what is on drives of a compute copy, which lies at `memory` without gaps.
  std::vector<SwapPiece> copy_pieces(int param, std::byte* memory) const;
  // Those of one chunk in a slot.
  std::vector<SwapPiece> chunk_pieces(int param, const StateChunk& chunk, std::byte* slot) const;

  // That of a block input between its buffer in the plan's arena on the drives and `memory`.
  SwapPiece input_piece(const PlanBuffer& on_drive, std::byte* memory) const;

  StatePlanes planes(const StateChunk& chunk) const;
  // Of the chunks together that stay in host memory.
  StatePlanes host_planes(int param) const;
  // Where the planes of a chunk in a slot lie; `copy` is the FlatParam's compute copy where that
  // stays in memory.
  StateAddress address(int param, const StateChunk& chunk, std::byte* slot, std::byte* copy) const;

 private:
  nvme::ChunkKey input_key(size_t begin) const;

  const PlanInput& input_;
  const PlacementPlan& placement_;
  std::vector<std::vector<StateChunk>> chunks_;  // per FlatParam, of those on drives
  std::vector<int64_t> versions_;
  uint64_t bytes_per_step_ = 0;
  std::unique_ptr<nvme::Swapper> swapper_;
};

}  // namespace orlop
