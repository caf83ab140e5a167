#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "model/block.h"
#include "model/param_layout.h"
#include "orlop/types.h"

namespace orlop {

// Everything a plan depends on besides the placement: the model's shape, the batch and what the
// backend asks for. A plan is a pure function of this and of a PlacementPlan.
struct PlanInput {
  ModelLayout layout;
  // Ranks that share the model. Every FlatParam is cut into as many parts of equal, padded length;
  // each rank keeps and updates the states of its part. The plan is the same on all of them.
  int world_size = 1;
  DType compute_dtype = DType::kBF16;
  DType moment_dtype = DType::kF32;
  // What gradients travel as between ranks. kF32: a reduction. kBF16: every rank rounds its
  // contribution once, and who owns a part adds those of all ranks in fp32, in the order of ranks.
  DType gradient_wire = DType::kF32;
  // No step trains: the states of a FlatParam are its compute copy alone, and there are neither
  // gradients nor updates. With it micro_batches is 1.
  bool evaluates_only = false;
  BatchShape shape;  // of one micro-batch
  int64_t hidden = 0;
  int micro_batches = 1;                         // per optimizer step
  std::vector<size_t> forward_workspace_bytes;   // per block
  std::vector<size_t> backward_workspace_bytes;  // per block
  std::vector<double> forward_flops;             // per block and micro-batch
  std::vector<double> attention_flops;           // those of attention among them
  std::vector<double> forward_bytes;             // likewise, of what is no matmul and no attention
  std::vector<size_t> norm_scratch_bytes;        // per FlatParam
  size_t rope_bytes = 0;
  size_t snapshot_bytes = 0;  // host memory in which a save copies what updates wait for
  size_t device_fixed_bytes =
      0;  // context, libraries and their workspace: in the budget, not in the arena
  bool device_is_host = false;
  // Clipping and fp16 need every gradient before the first update. Without them a FlatParam's
  // update starts inside backward, as soon as its gradient is there.
  bool updates_wait_for_norm = true;

  size_t activation_bytes() const;             // one block input of one micro-batch
  size_t drive_activation_bytes() const;       // likewise where drives read and write it
  size_t batch_bytes() const;                  // index arrays of one micro-batch
  int64_t shard_numel(int param) const;        // a rank's part, with its padding
  size_t param_bytes(int param) const;         // compute copy of all parts
  size_t grad_bytes(int param) const;          // fp32, of all parts
  size_t shard_param_bytes(int param) const;   // compute copy of one part
  size_t wire_bytes(int param) const;          // the gradient of all parts as it travels
  size_t rounded_grad_bytes(int param) const;  // of one part: what the optimizer reads
  // Of one part: masters and moments, compute copy included, or that alone.
  size_t state_bytes(int param) const;
  size_t state_bytes_per_element() const;
  size_t saved_bytes(int param) const;  // of one part: masters in fp32 and moments: in a checkpoint
};

// Where the states of one FlatParam live between steps. What is on a drive is updated on the host,
// chunk by chunk; the compute copy, and the first chunks of either, may stay in host memory then.
struct ParamPlacement {
  bool resident = false;         // the compute copy stays on the device, too
  Tier optimizer = Tier::kHost;  // masters and moments
  Tier copy = Tier::kHost;       // compute copy: kHost, or kNvme with the optimizer's states there
  // With kNvme: the first chunks that are at home in host memory all the same; fewer than all.
  int host_chunks = 0;  // of masters and moments
  int host_copies = 0;  // of the compute copy: at least host_chunks
};

// A run of elements of one FlatParam whose states move to and from a drive together.
struct StateChunk {
  int index = -1;
  int64_t begin = 0;
  int64_t numel = 0;
};

// Chunks but the last of a FlatParam are multiples of this many elements, so that every plane of
// theirs is a whole number of blocks of a drive.
inline constexpr int64_t kChunkGranule = 4096;

// Of memory that drives read and write, in bytes.
inline constexpr size_t kDriveAlignment = 4096;

// Home of every state, and the shape of the schedule.
struct PlacementPlan {
  std::vector<ParamPlacement> params;
  int prefetch_depth = 1;
  Tier activations = Tier::kHost;  // block inputs between forward and backward
  // With kNvme: of a wave's block inputs those that backward needs first, which stay in host
  // memory.
  int host_inputs = 0;
  int wave = 1;                         // micro-batches that go through a block together
  int64_t chunk_numel = kChunkGranule;  // elements of a StateChunk
  int swap_slots = 4;                   // host buffers through which chunks pass
  int swap_ahead = 0;                   // visits by which compute copies leave the drives earlier
  // Where updates start inside backward: FlatParams whose gradient may lie in host memory at once.
  int gradients_in_flight = 1;

  bool uses_nvme() const;
  // Of a FlatParam of which a rank's part has `numel` elements; an empty one has one empty chunk.
  int chunk_count(int64_t numel) const;
  std::vector<StateChunk> chunks(int64_t numel) const;
  // Where a chunk of a FlatParam is at home.
  bool states_are_on_nvme(int param, const StateChunk& chunk) const;
  bool copy_is_on_nvme(int param, const StateChunk& chunk) const;
  // Elements that the chunks in host memory have together, of a FlatParam on drives.
  int64_t host_states_numel(int param) const;
  int64_t host_copy_numel(int param, int64_t numel) const;
};

// Operations of one lane run, and end, in order. Drives have four: compute copies and block inputs
// on their way to the device, block inputs on their way from it, and states on their way to and
// from an update.
enum class PlanLaneKind : uint8_t {
  kCompute,
  kUpload,
  kOffload,
  kOptimizer,
  kComm,
  kSwapIn,
  kSwapOut,
  kStatesIn,
  kStatesOut
};
inline constexpr int kPlanLanes = 9;

// The index of one operation per lane, or -1.
using OpPerLane = std::array<int, kPlanLanes>;
inline constexpr OpPerLane kNoOps = {-1, -1, -1, -1, -1, -1, -1, -1, -1};

const char* lane_name(PlanLaneKind lane);

enum class OpKind : uint8_t {
  kUploadBatch,    // micro_batch: index arrays
  kUploadParam,    // param: this rank's part, into its row of the device copy
  kAllGather,      // param: the parts of all ranks, each into its row
  kForward,        // block, micro_batch
  kBackward,       // block, micro_batch; recomputes; the head's also starts the pass
  kOffloadInput,   // block, micro_batch: block input to pinned memory
  kUploadInput,    // block, micro_batch: and back
  kSwapOutInput,   // block, micro_batch: block input from pinned memory to the drives
  kSwapInInput,    // block, micro_batch: and back
  kZeroGrad,       // param: fp32 gradient
  kParkGrad,       // to pinned memory, between waves: fp32 gradient of param, or what micro_batch's
                   // backward pass hands to the embedding
  kUnparkGrad,     // and back
  kReduceScatter,  // param: this rank's row of the gradient becomes the sum over all ranks
  kNarrowGrad,     // param: the gradient of all parts, to the dtype in which it travels
  kExchangeGrad,   // param: every rank gets what all of them have for its part, in their order
  kSumGrad,        // param: and adds it up
  kRoundGrad,      // param: this rank's part, to the optimizer's dtype, with its share of the norm
  kOffloadGrad,  // param: rounded gradient to pinned memory, and its own StepScalars if it has any
  kOffloadLoss,  // micro_batch: loss of every row
  kGatherNorms,  // the square sums of all ranks
  kFinishNorm,   // all square sums -> StepScalars; with param: of this one alone
  kOffloadScalars,  // StepScalars to pinned memory
  kDeviceAdam,      // param
  kHostAdam,        // param: elements of chunk, which has an index if they come from a drive
  kSwapInParam,     // param: compute copy from the drives to pinned memory, after its gate
  kSwapInStates,    // param, chunk: what lies on the drives, to a slot
  kSwapOutStates,   // and back
};

enum class BufferKind : uint8_t {
  kParam,        // param: compute copy
  kGrad,         // param: fp32; in the host tier: parked
  kRoundedGrad,  // param; in the host tier: waits there for its update
  kWire,         // param: its gradient as it leaves for other ranks; then the fp32 sum of one part
  kNormScratch,
  kInput,           // block, micro_batch: block input
  kActivationGrad,  // micro_batch: gradient that travels down the blocks
  kWorkspace,
  kBatch,  // micro_batch; in the host tier: staging
  kLoss,   // micro_batch
  kState,  // param: master planes and moments, where its Adam runs; of one on drives the rest
           // planes of the chunks that stay in host memory; of an evaluation the compute copy alone
  kRope,
  kNormSums,  // (ranks) square sums and first non-finite index of every FlatParam
  kSnapshot,  // of states, while a save is running
  kScalars,   // StepScalars and the loss scale; with param: StepScalars of this one alone
  kSwapSlot,  // chunk under update: compute copy if it comes from a drive, then the other planes
};

// A piece of a tier's arena. Persistent buffers live as long as the engine and lie at the arena's
// start, in order; the others live from their first to their last use in the step.
struct PlanBuffer {
  BufferKind kind = BufferKind::kWorkspace;
  Tier tier = Tier::kDevice;
  int param = -1;
  int block = -1;
  int micro_batch = -1;
  size_t bytes = 0;
  size_t alignment = kDeviceAlignment;
  bool persistent = false;
  int first_op = -1;
  int last_op = -1;
  size_t offset = 0;
};

struct BufferUse {
  int buffer = -1;
  bool write = false;
};

struct PlanOp {
  OpKind kind = OpKind::kForward;
  PlanLaneKind lane = PlanLaneKind::kCompute;
  int block = -1;
  int param = -1;
  int micro_batch = -1;
  StateChunk chunk;
  size_t swap_bytes = 0;  // to or from the drives
  std::vector<BufferUse> uses;
  std::vector<int>
      waits;  // earlier operations of other lanes that must have run; at most one per lane
  // FlatParam whose update, which the step before made, must be over; with it, as updates run in
  // order, are those before it. -1: none.
  int after_update = -1;
  bool signals = false;  // an operation of another lane waits for this one
};

// One step as data: operations in issue order, with their buffers and dependencies. A step with
// fewer micro-batches is the same plan without the operations of those that are missing.
struct StepPlan {
  std::vector<PlanOp> ops;
  std::vector<PlanBuffer> buffers;
  // Persistent buffers that every plan of an engine has.
  int rope = -1;
  int norm_sums = -1;  // or none
  int scalars = -1;
  int host_scalars = -1;
  int snapshot = -1;            // or none
  std::vector<int> swap_slots;  // the last two belong to those who read states between steps
  size_t device_bytes = 0;      // the device arena
  size_t host_bytes = 0;        // the pinned host arena
  size_t nvme_bytes = 0;        // on the drives: chunks of states, and nvme_input_bytes
  size_t nvme_input_bytes = 0;  // block inputs, which have an arena of their own there

  size_t arena_bytes(Tier tier) const {
    return tier == Tier::kDevice ? device_bytes
           : tier == Tier::kHost ? host_bytes
                                 : nvme_input_bytes;
  }
  const PlanBuffer& buffer(const BufferUse& use) const {
    return buffers[static_cast<size_t>(use.buffer)];
  }

  // One line per operation; what golden tests compare.
  std::string to_text(const PlanInput& input) const;
};

// What lies in the kScalars buffers of both tiers, and, in the host's only, behind it the gates:
// those that updates open, then those that saves open.
inline constexpr size_t kLossScaleOffset =
    kDeviceAlignment;  // fp32: loss scale over labelled tokens
// uint32 per FlatParam, twice, and two that count what came from and went to the drives
inline constexpr size_t kGatesOffset = 2 * kDeviceAlignment;
constexpr size_t gates_count(size_t params) { return 2 * params + 2; }

// What lies in a rank's row of the kNormSums buffer: fp64 square sums, then int64 first non-finite
// indices, counted from the start of the rank's part.
constexpr size_t first_nonfinite_offset(size_t params) {
  return align_up(params * sizeof(double), kDeviceAlignment);
}
constexpr size_t norm_row_bytes(size_t params) { return 2 * first_nonfinite_offset(params); }

// The first use that `op` makes of a buffer of this kind, tier and, unless negative, FlatParam; or
// null.
const BufferUse* find_use(const StepPlan& plan, const PlanOp& op, BufferKind kind, Tier tier,
                          int param = -1);

// FlatParams in the order in which a training step updates them.
std::vector<int> update_order(const StepPlan& plan);

// Bytes that a rank receives from others in an operation.
size_t received_bytes(const PlanInput& input, const PlanOp& op);

// How many of the first of `order` a save can copy to the snapshot at once.
size_t snapshot_count(const PlanInput& input, const std::vector<int>& order);

// Builds the step: training (forward, backward, update), or evaluation (forward and loss only) with
// one micro-batch. Persistent buffers and their offsets are the same for every number of
// micro-batches and both kinds.
StepPlan make_train_plan(const PlanInput& input, const PlacementPlan& placement);
StepPlan make_eval_plan(const PlanInput& input, const PlacementPlan& placement);

const char* op_name(OpKind kind);

// Part of the update on the host, which goes on beside the next step's walk.
bool is_host_update(OpKind kind);

// Bytes of a chunk on the drives: its states but the compute copy, and the compute copy; each is
// one transfer, padded to kDriveAlignment.
size_t chunk_rest_bytes(const PlanInput& input, const StateChunk& chunk);
size_t chunk_copy_bytes(const PlanInput& input, const StateChunk& chunk);

}  // namespace orlop
