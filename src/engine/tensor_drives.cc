#include "engine/tensor_drives.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <iterator>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "base/completion.h"
#include "engine/swap_space.h"
#include "orlop/weight_drives.h"
#include "zero/step_plan.h"

namespace orlop {
namespace {

constexpr int64_t kGranule = 128;  // elements: every plane of a chunk begins at a multiple of 128 B

// Of every plane in the slot, which the last chunk of a tensor fills in part.
StatePlanes chunk_planes(int64_t numel, const TensorSpec& spec) {
  return state_planes(static_cast<int64_t>(align_up(static_cast<size_t>(numel), kGranule)),
                      spec.dtype, spec.moment_dtype);
}

// Where in a slot the weights of a chunk begin, behind its states.
size_t weights_offset(const StatePlanes& planes) {
  return align_up(planes.rest_bytes, kDriveAlignment);
}

size_t slot_count(const StateDrives& drives) {
  check(drives.slot_bytes >= kPageBytes && drives.slot_bytes % kPageBytes == 0, ErrorCode::kUsage,
        "a slot of {} bytes for states on drives is no multiple of {}", drives.slot_bytes,
        kPageBytes);
  const size_t count = drives.host_bytes / drives.slot_bytes;
  check(count >= 3, ErrorCode::kUsage,
        "{} bytes of host memory hold {} slots of {} bytes for states on drives, 3 are needed; "
        "raise the memory or make the slots smaller",
        drives.host_bytes, count, drives.slot_bytes);
  return count;
}

const std::byte* offset(const void* memory, int64_t elements, DType dtype) {
  return static_cast<const std::byte*>(memory) + static_cast<size_t>(elements) * dtype_bytes(dtype);
}

}  // namespace

TensorDrives::TensorDrives(const StateDrives& drives)
    : slot_bytes_(drives.slot_bytes),
      update_slots_(slot_count(drives) - 1),
      arena_((update_slots_ + 1) * slot_bytes_) {
  nvme::SwapperOptions options = swapper_options(drives.nvme);
  options.rank = next_swap_owner();
  options.name_of = [this](const nvme::ChunkKey& key) {
    return fmt::format("'{}'", names_[static_cast<size_t>(key.shard)]);
  };
  swapper_ = std::make_unique<nvme::Swapper>(options);
  check_alignment(*swapper_);
  arena_.carve((update_slots_ + 1) * slot_bytes_, "slots of drives", kPageBytes);
  swapper_->register_memory({arena_.data(), (update_slots_ + 1) * slot_bytes_}, slot_bytes_);
}

TensorDrives::~TensorDrives() {
  for (const auto& space : spaces_) space->end_updates();
}

HostUpdates TensorDrives::queue_options() {
  HostUpdates updates;
  updates.swapper = swapper_.get();
  updates.versions = &versions_;
  updates.slots = static_cast<int>(update_slots_);
  return updates;
}

// Weights on drives have chunks of their own size, which hold the same elements.
int64_t TensorDrives::chunk_numel(const TensorSpec& spec) const {
  if (!hold_weights(spec)) {
    const size_t granule_bytes = chunk_planes(kGranule, spec).rest_bytes;
    return static_cast<int64_t>(slot_bytes_ / granule_bytes) * kGranule;
  }
  const WeightSpace& space = *spec.weight_drives->space();
  const size_t element = dtype_bytes(spec.dtype);
  const auto numel = static_cast<int64_t>(space.chunk_bytes() / element);
  const size_t taken = weights_offset(chunk_planes(numel, spec)) + space.chunk_bytes();
  check(
      taken <= slot_bytes_, ErrorCode::kUsage,
      "a chunk of '{}', whose weights are on drives, has {} bytes with its states, a slot {}; make "
      "both with the same slots",
      spec.name, taken, slot_bytes_);
  check(space.bytes(spec.drive_weight) == static_cast<size_t>(spec.numel) * element,
        ErrorCode::kUsage, "'{}' has {} elements of {} bytes, on drives it has {} bytes", spec.name,
        spec.numel, element, space.bytes(spec.drive_weight));
  return numel;
}

void TensorDrives::add(int64_t first, std::span<const TensorSpec> specs) {
  std::vector<std::vector<Chunk>> added(specs.size());
  std::vector<nvme::ChunkSpec> places;
  for (size_t i = 0; i < specs.size(); ++i) {
    if (!hold(specs[i])) continue;
    const int64_t most = chunk_numel(specs[i]);
    for (int64_t begin = 0; begin < specs[i].numel; begin += most) {
      const int64_t numel = std::min(most, specs[i].numel - begin);
      const StatePlanes planes = chunk_planes(numel, specs[i]);
      const nvme::ChunkKey key{static_cast<int32_t>(first + static_cast<int64_t>(i)),
                               static_cast<int32_t>(added[i].size())};
      added[i].push_back({begin, numel, planes, true});
      places.push_back({key, planes.rest_bytes});
    }
  }
  swapper_->add_chunks(places);
  names_.resize(static_cast<size_t>(first));
  for (const TensorSpec& spec : specs) names_.push_back(spec.name);
  chunks_.resize(static_cast<size_t>(first));
  std::ranges::move(added, std::back_inserter(chunks_));
  versions_.resize(chunks_.size(), 0);
  for (size_t i = 0; i < specs.size(); ++i) {
    if (!hold_weights(specs[i])) continue;
    const std::shared_ptr<WeightSpace>& space = specs[i].weight_drives->space();
    versions_[static_cast<size_t>(first) + i] = space->version(specs[i].drive_weight);
    if (std::ranges::find(spaces_, space) == spaces_.end()) spaces_.push_back(space);
  }
}

StateAddress TensorDrives::address(const TensorStore::Tensor& tensor, const Chunk& chunk,
                                   std::byte* memory) {
  if (hold_weights(tensor.spec)) return {memory + weights_offset(chunk.planes), memory};
  const std::byte* copy = offset(tensor.states.weights, chunk.begin, tensor.spec.dtype);
  return {const_cast<std::byte*>(copy), memory};
}

std::vector<SwapPiece> TensorDrives::pieces(int64_t index, const TensorStore::Tensor& tensor,
                                            size_t chunk, std::byte* memory) {
  const StatePlanes& planes = chunks_of(index)[chunk].planes;
  const size_t bytes = align_up(planes.rest_bytes, kDriveAlignment);
  std::vector<SwapPiece> moved{
      {{static_cast<int32_t>(index), static_cast<int32_t>(chunk)}, {memory, bytes}}};
  const TensorSpec& spec = tensor.spec;
  if (hold_weights(spec)) {
    WeightSpace& space = *spec.weight_drives->space();
    moved.push_back(space.piece(spec.drive_weight, chunk, memory + weights_offset(planes)));
  }
  return moved;
}

// ---------------------------------------------------------------------------------------------------
// Updates

size_t TensorDrives::ahead() const { return update_slots_ > 2 ? update_slots_ - 1 : update_slots_; }

std::vector<ChunkUpdate> TensorDrives::update(int64_t index, const TensorStore::Tensor& tensor,
                                              const TensorUpdate& update, int threads,
                                              const std::function<void()>& begin) {
  std::vector<ChunkUpdate> updates;
  std::vector<Chunk>& chunks = chunks_of(index);
  for (size_t i = 0; i < chunks.size(); ++i) {
    Chunk& chunk = chunks[i];
    std::byte* const memory = slot(next_slot_);
    AdamShard states = adam_shard(chunk.planes, address(tensor, chunk, memory), 0, chunk.numel);
    states.rng_offset = chunk.begin;
    states.grad = offset(update.gradient.data, chunk.begin, update.gradient.dtype);
    states.grad_dtype = update.gradient.dtype;
    check_adam_shard(states);
    UpdateOp op;
    op.param = static_cast<int>(index);
    op.slot = static_cast<int>(next_slot_);
    UpdateOp adam = op;
    adam.parts = {UpdatePart{states, true, tensor.spec.seed, update.hyper}};
    op.pieces = pieces(index, tensor, i, memory);
    op.is_blank = &chunk.is_blank;
    ChunkUpdate made;
    made.in = {op, tensor.gate()};
    made.in.op.kind = UpdateOp::Kind::kSwapIn;
    made.out = {op, tensor.gate()};
    made.out.op.kind = UpdateOp::Kind::kSwapOut;
    made.out.op.is_last = i + 1 == chunks.size();
    made.adam = {std::move(adam), tensor.gate(),
                 [begin = i == 0 ? begin : nullptr, states, threads, is_written = update.is_written,
                  is_blank = &chunk.is_blank] {
                   if (begin) begin();
                   if (is_written || *is_blank) mend_master(states, threads);
                 }};
    updates.push_back(std::move(made));
    next_slot_ = (next_slot_ + 1) % update_slots_;
  }
  return updates;
}

void TensorDrives::before_updates() {
  for (const auto& space : spaces_) space->wait_fetches();
}

void TensorDrives::expect(const TensorStore::Tensor& tensor, uint32_t version) {
  if (!hold_weights(tensor.spec)) return;
  tensor.spec.weight_drives->space()->expect(tensor.spec.drive_weight, tensor.gate(), version,
                                             tensor.arena);
}

void TensorDrives::flush_weights() {
  for (const auto& space : spaces_) space->flush();
}

// ---------------------------------------------------------------------------------------------------
// Between updates

void TensorDrives::visit(int64_t index, const TensorStore::Tensor& tensor, int64_t first,
                         int64_t numel, const Use& use) {
  std::vector<Chunk>& chunks = chunks_of(index);
  while (numel > 0) {
    const auto position = static_cast<size_t>(first / chunks.front().numel);
    Chunk& chunk = chunks[position];
    const int64_t inside = first - chunk.begin;
    const int64_t count = std::min(numel, chunk.numel - inside);
    load(index, tensor, position);
    const StateAddress at = address(tensor, chunk, own_slot());
    if (use(adam_shard(chunk.planes, at, inside, count), first)) {
      loaded_->is_dirty = true;
      chunk.is_blank = false;
    }
    first += count;
    numel -= count;
  }
}

void TensorDrives::adopt_on_drives(int64_t index, const TensorStore::Tensor& tensor,
                                   const std::byte* weights) {
  std::vector<Chunk>& chunks = chunks_of(index);
  for (size_t i = 0; i < chunks.size(); ++i) {
    const std::byte* given = offset(weights, chunks[i].begin, tensor.spec.dtype);
    const AdamShard states = load(index, tensor, i);
    const StateAddress at = address(tensor, chunks[i], own_slot());
    const size_t bytes = static_cast<size_t>(chunks[i].numel) * dtype_bytes(tensor.spec.dtype);
    const bool differs = std::memcmp(at.copy, given, bytes) != 0;
    if (!adopt_weights(states, given) && !differs) continue;
    loaded_->is_dirty = true;
    chunks[i].is_blank = false;
  }
  settle();  // who fetches reads the drive
}

void TensorDrives::adopt(int64_t index, const TensorStore::Tensor& tensor, const void* weights) {
  if (hold_weights(tensor.spec))
    return adopt_on_drives(index, tensor, static_cast<const std::byte*>(weights));
  std::vector<Chunk>& chunks = chunks_of(index);
  for (size_t i = 0; i < chunks.size(); ++i) {
    const Chunk& chunk = chunks[i];
    const DType dtype = tensor.spec.dtype;
    const std::byte* given = offset(weights, chunk.begin, dtype);
    auto* copy = const_cast<std::byte*>(offset(tensor.states.weights, chunk.begin, dtype));
    const size_t bytes = static_cast<size_t>(chunk.numel) * dtype_bytes(dtype);
    if (chunk.is_blank || dtype != DType::kF16) {
      if (given != copy) std::memmove(copy, given, bytes);
      if (chunk.is_blank && is_loaded(index, i))
        loaded_.reset();  // its master is of weights before
    } else {
      const AdamShard states = load(index, tensor, i);
      loaded_->is_dirty = adopt_weights(states, given) || loaded_->is_dirty;
    }
  }
}

int64_t TensorDrives::piece_numel(int64_t index, int64_t first) const {
  const std::vector<Chunk>& chunks = chunks_[static_cast<size_t>(index)];
  const Chunk& chunk = chunks[static_cast<size_t>(first / chunks.front().numel)];
  return chunk.begin + chunk.numel - first;
}

bool TensorDrives::is_loaded(int64_t index, size_t chunk) const {
  return loaded_ && loaded_->tensor == index && loaded_->chunk == chunk &&
         loaded_->version == versions_[static_cast<size_t>(index)];
}

// The chunk's states in the caller's slot.
AdamShard TensorDrives::load(int64_t index, const TensorStore::Tensor& tensor, size_t chunk) {
  const Chunk& wanted = chunks_of(index)[chunk];
  const AdamShard states =
      adam_shard(wanted.planes, address(tensor, wanted, own_slot()), 0, wanted.numel);
  if (is_loaded(index, chunk)) return states;
  settle();
  loaded_.reset();
  Loaded loading{index, chunk, versions_[static_cast<size_t>(index)], false,
                 pieces(index, tensor, chunk, own_slot())};
  const std::span<const SwapPiece> all = loading.pieces;
  if (wanted.is_blank) {
    move(loading, all.subspan(1), false);  // the weights, if they are there
    std::memset(own_slot(), 0, wanted.planes.rest_bytes);
    mend_master(states, 1);
  } else {
    move(loading, all, false);
  }
  loaded_ = std::move(loading);
  return states;
}

void TensorDrives::settle() {
  if (!loaded_ || !loaded_->is_dirty) return;
  Loaded changed = *std::exchange(loaded_, std::nullopt);  // after an error it is lost
  move(changed, changed.pieces, true);
  changed.is_dirty = false;
  loaded_ = std::move(changed);
}

void TensorDrives::move(const Loaded& chunk, std::span<const SwapPiece> pieces, bool writes) {
  std::vector<Completion<>> transfers;
  for (const SwapPiece& piece : pieces) {
    nvme::Swapper& swapper = piece.swapper != nullptr ? *piece.swapper : *swapper_;
    const nvme::SwapRequest request{piece.key, chunk.version, 0};
    Completion<> ended;
    const auto done = [ended](const std::exception_ptr& error) mutable {
      error ? ended.set_error(error) : ended.set_value();
    };
    if (writes) {
      swapper.swap_out(request, piece.memory, done);
    } else {
      swapper.swap_in(request, piece.memory, done);
    }
    transfers.push_back(ended);
  }
  std::exception_ptr error;
  for (const Completion<>& transfer : transfers) {
    const std::exception_ptr failure = transfer.wait_error();
    if (!error) error = failure;
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace orlop
