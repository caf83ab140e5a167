#include "engine/tensor_drives.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <iterator>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "base/completion.h"
#include "engine/swap_space.h"
#include "zero/step_plan.h"

namespace orlop {
namespace {

constexpr int64_t kGranule = 128;  // elements: every plane of a chunk begins at a multiple of 128 B

// Of every plane in the slot, which the last chunk of a tensor fills in part.
StatePlanes chunk_planes(int64_t numel, const TensorSpec& spec) {
  return state_planes(static_cast<int64_t>(align_up(static_cast<size_t>(numel), kGranule)),
                      spec.dtype, spec.moment_dtype);
}

int64_t chunk_numel(const TensorSpec& spec, size_t slot_bytes) {
  const size_t granule_bytes = chunk_planes(kGranule, spec).rest_bytes;
  return static_cast<int64_t>(slot_bytes / granule_bytes) * kGranule;
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

// Every optimizer of this process has files of its own, also in one directory.
int next_number() {
  static std::atomic<int> number{0};
  return number++;
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
  options.rank = next_number();
  options.name_of = [this](const nvme::ChunkKey& key) {
    return fmt::format("'{}'", names_[static_cast<size_t>(key.shard)]);
  };
  swapper_ = std::make_unique<nvme::Swapper>(options);
  check_alignment(*swapper_);
  arena_.carve((update_slots_ + 1) * slot_bytes_, "slots of drives", kPageBytes);
  swapper_->register_memory({arena_.data(), (update_slots_ + 1) * slot_bytes_}, slot_bytes_);
}

HostUpdates TensorDrives::queue_options() {
  HostUpdates updates;
  updates.swapper = swapper_.get();
  updates.versions = &versions_;
  updates.slots = static_cast<int>(update_slots_);
  return updates;
}

void TensorDrives::add(int64_t first, std::span<const TensorSpec> specs) {
  std::vector<std::vector<Chunk>> added(specs.size());
  std::vector<nvme::ChunkSpec> places;
  for (size_t i = 0; i < specs.size(); ++i) {
    if (!hold(specs[i])) continue;
    const int64_t most = chunk_numel(specs[i], slot_bytes_);
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
}

StateAddress TensorDrives::address(const TensorStore::Tensor& tensor, const Chunk& chunk,
                                   std::byte* memory) {
  const std::byte* copy = offset(tensor.states.weights, chunk.begin, tensor.spec.dtype);
  return {const_cast<std::byte*>(copy), memory};
}

SwapPiece TensorDrives::piece(int64_t index, size_t chunk, std::byte* memory) {
  const size_t bytes = align_up(chunks_of(index)[chunk].planes.rest_bytes, kDriveAlignment);
  return {{static_cast<int32_t>(index), static_cast<int32_t>(chunk)}, {memory, bytes}};
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
    op.pieces = {piece(index, i, memory)};
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

void TensorDrives::adopt(int64_t index, const TensorStore::Tensor& tensor, const void* weights) {
  std::vector<Chunk>& chunks = chunks_of(index);
  for (size_t i = 0; i < chunks.size(); ++i) {
    const Chunk& chunk = chunks[i];
    const DType dtype = tensor.spec.dtype;
    const std::byte* given = offset(weights, chunk.begin, dtype);
    auto* copy = const_cast<std::byte*>(offset(tensor.states.weights, chunk.begin, dtype));
    const size_t bytes = static_cast<size_t>(chunk.numel) * dtype_bytes(dtype);
    if (chunk.is_blank || dtype == DType::kF32) {
      if (given != copy) std::memmove(copy, given, bytes);
      if (chunk.is_blank && is_loaded(index, i))
        loaded_.reset();  // its master is of weights before
    } else if (dtype == DType::kF16 || std::memcmp(copy, given, bytes) != 0) {
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
  const Loaded loading{index, chunk, versions_[static_cast<size_t>(index)], false};
  if (wanted.is_blank) {
    std::memset(own_slot(), 0, wanted.planes.rest_bytes);
    mend_master(states, 1);
  } else {
    move(loading, false);
  }
  loaded_ = loading;
  return states;
}

void TensorDrives::settle() {
  if (!loaded_ || !loaded_->is_dirty) return;
  const Loaded changed = *std::exchange(loaded_, std::nullopt);  // after an error it is lost
  move(changed, true);
  loaded_ = changed;
  loaded_->is_dirty = false;
}

void TensorDrives::move(const Loaded& chunk, bool writes) {
  const SwapPiece moved = piece(chunk.tensor, chunk.chunk, own_slot());
  const nvme::SwapRequest request{moved.key, chunk.version, 0};
  Completion<> ended;
  const auto done = [ended](const std::exception_ptr& error) mutable {
    error ? ended.set_error(error) : ended.set_value();
  };
  if (writes) {
    swapper_->swap_out(request, moved.memory, done);
  } else {
    swapper_->swap_in(request, moved.memory, done);
  }
  ended.wait();
}

}  // namespace orlop
