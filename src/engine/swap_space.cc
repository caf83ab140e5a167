#include "engine/swap_space.h"

#include <atomic>
#include "base/bytes.h"
#include "base/check.h"

namespace orlop {
namespace {

nvme::ChunkKey rest_key(int param, int chunk) { return {2 * param, chunk}; }
nvme::ChunkKey copy_key(int param, int chunk) { return {2 * param + 1, chunk}; }

}  // namespace

nvme::SwapperOptions swapper_options(const NvmeConfig& nvme) {
  nvme::SwapperOptions options;
  options.directories = nvme.paths;
  options.direct = nvme.direct;
  options.verify = nvme::parse_verify(nvme.verify);
  options.engine = nvme::parse_io_engine(nvme.engine);
  options.queue.block_bytes = nvme.block_bytes;
  options.queue.depth = static_cast<unsigned>(nvme.queue_depth);
  return options;
}

int next_swap_owner() {
  static std::atomic<int> number{0};
  return number++;
}

void check_alignment(const nvme::Swapper& swapper) {
  check(kDriveAlignment % swapper.alignment() == 0, ErrorCode::kUsage,
        "the drives of --nvme want {} bytes of alignment for direct I/O, plans are made for {}; "
        "set nvme.direct to false, or choose another drive",
        swapper.alignment(), kDriveAlignment);
}

SwapSpace::SwapSpace(const PlanInput& input, const PlacementPlan& placement, const StepPlan& train,
                     const EngineConfig& config, const SwapOwner& owner)
    : input_(input),
      placement_(placement),
      chunks_(placement.params.size()),
      versions_(placement.params.size(), 0) {
  nvme::SwapperOptions options = swapper_options(config.nvme);
  const int params = static_cast<int>(placement.params.size());
  for (int param = 0; param < params; ++param) {
    if (placement.params[static_cast<size_t>(param)].optimizer != Tier::kNvme) continue;
    chunks_[static_cast<size_t>(param)] = placement.chunks(input.shard_numel(param));
    for (const StateChunk& chunk : chunks(param)) {
      if (!placement.states_are_on_nvme(param, chunk)) continue;
      options.chunks.push_back({rest_key(param, chunk.index), chunk_rest_bytes(input, chunk)});
      if (!placement.copy_is_on_nvme(param, chunk)) continue;
      options.chunks.push_back({copy_key(param, chunk.index), chunk_copy_bytes(input, chunk)});
    }
  }
  for (size_t begin = 0; begin < train.nvme_input_bytes; begin += input.drive_activation_bytes()) {
    options.chunks.push_back({input_key(begin), input.drive_activation_bytes()});
  }
  for (const PlanOp& op : train.ops) {
    const bool writes = op.kind == OpKind::kSwapOutStates || op.kind == OpKind::kSwapOutInput;
    if (writes) bytes_per_step_ += op.swap_bytes;
  }
  options.rank = owner.rank;
  options.world_size = input.world_size;
  options.run_id = owner.run_id;
  options.keep_count_of_day = config.limits.nvme_writes_per_day_bytes.has_value();
  swapper_ = std::make_unique<nvme::Swapper>(options);
  check_alignment(*swapper_);
}

std::vector<SwapPiece> SwapSpace::copy_pieces(int param, std::byte* memory) const {
  std::vector<SwapPiece> pieces;
  for (const StateChunk& chunk : chunks(param)) {
    if (!placement_.copy_is_on_nvme(param, chunk)) continue;
    const size_t bytes = chunk_copy_bytes(input_, chunk);
    pieces.push_back({copy_key(param, chunk.index), {memory, bytes}});
    memory += bytes;
  }
  return pieces;
}

std::vector<SwapPiece> SwapSpace::chunk_pieces(int param, const StateChunk& chunk,
                                               std::byte* slot) const {
  std::vector<SwapPiece> pieces;
  if (placement_.copy_is_on_nvme(param, chunk)) {
    pieces.push_back({copy_key(param, chunk.index), {slot, chunk_copy_bytes(input_, chunk)}});
    slot += chunk_copy_bytes(input_, chunk);
  }
  pieces.push_back({rest_key(param, chunk.index), {slot, chunk_rest_bytes(input_, chunk)}});
  return pieces;
}

nvme::ChunkKey SwapSpace::input_key(size_t begin) const {
  const size_t index = begin / input_.drive_activation_bytes();
  return {static_cast<int32_t>(2 * chunks_.size()), static_cast<int32_t>(index)};
}

// All of them have one length, so each lies on a multiple of it.
SwapPiece SwapSpace::input_piece(const PlanBuffer& on_drive, std::byte* memory) const {
  ORLOP_INVARIANT(on_drive.offset % input_.drive_activation_bytes() == 0);
  return {input_key(on_drive.offset), {memory, input_.drive_activation_bytes()}};
}

StatePlanes SwapSpace::planes(const StateChunk& chunk) const {
  return state_planes(chunk.numel, input_.compute_dtype, input_.moment_dtype);
}

StatePlanes SwapSpace::host_planes(int param) const {
  return state_planes(placement_.host_states_numel(param), input_.compute_dtype,
                      input_.moment_dtype);
}

StateAddress SwapSpace::address(int param, const StateChunk& chunk, std::byte* slot,
                                std::byte* copy) const {
  if (placement_.copy_is_on_nvme(param, chunk))
    return {slot, slot + chunk_copy_bytes(input_, chunk)};
  return {copy + static_cast<size_t>(chunk.begin) * dtype_bytes(input_.compute_dtype), slot};
}

}  // namespace orlop
