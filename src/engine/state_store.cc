#include "engine/state_store.h"

#include <algorithm>
#include <cstring>

#include "base/bytes.h"
#include "base/check.h"
#include "base/completion.h"
#include "cpu_adam/thread_share.h"

namespace orlop {
namespace {

// What passes through staging at once: 14 bytes per element at most.
constexpr int64_t kStagedElements = int64_t{1} << 18;
// What one thread writes at once.
constexpr int64_t kPartElements = int64_t{1} << 16;
constexpr int64_t kPartBytes = int64_t{1} << 20;

}  // namespace

StateStore::StateStore(Backend& backend, const PlanInput& input, const StepPlan& plan, int rank,
                       const StateMemory& memory, QueueKind down, int threads)
    : backend_(backend),
      down_(down),
      threads_(threads),
      rank_(rank),
      world_size_(input.world_size),
      swap_(memory.swap),
      slot_(memory.slot),
      homes_(input.layout.flat_params.size()) {
  for (size_t param = 0; param < homes_.size(); ++param) {
    Home& home = homes_[param];
    home.planes = state_planes(input.shard_numel(static_cast<int>(param)), input.compute_dtype,
                               input.moment_dtype, input.evaluates_only);
    home.numel = input.layout.flat_params[param].numel;
    home.shard = shard_range(home.numel, rank, input.world_size);
    home.tier = Tier::kNvme;  // unless a buffer holds the states
    home.host_planes = home.planes;
    home.host_copy_numel = home.planes.numel;
    if (swap_ == nullptr || swap_->chunks(static_cast<int>(param)).empty()) continue;
    home.is_blank.resize(swap_->chunks(static_cast<int>(param)).size());
    home.host_planes = swap_->host_planes(static_cast<int>(param));
    home.host_copy_numel = swap_->host_copy_numel(static_cast<int>(param));
  }
  for (const PlanBuffer& buffer : plan.buffers) {
    if (buffer.param < 0 || !buffer.persistent) continue;
    Home& home = homes_[static_cast<size_t>(buffer.param)];
    const bool is_on_drives = !home.is_blank.empty();
    if (buffer.kind == BufferKind::kState && is_on_drives) {
      home.address.rest = memory.of(buffer);
    } else if (buffer.kind == BufferKind::kState) {
      home.tier = buffer.tier;
      home.address = state_address(home.planes, memory.of(buffer));
    } else if (buffer.kind == BufferKind::kParam && buffer.tier == Tier::kHost) {
      home.address.copy = memory.of(buffer);
    }
  }
  own_homes_ = homes_;
}

ElementRange StateStore::part_of_rank(int param, int rank, int64_t offset, int64_t numel) const {
  const ShardRange shard = shard_range(home(param).numel, rank, world_size_);
  return intersect({offset, numel}, {shard.begin, shard.numel});
}

void StateStore::read_from_copy(int param, std::byte* copy) {
  Home& home = homes_[static_cast<size_t>(param)];
  const StateAddress to = state_address(home.planes, copy);
  if (home.tier == Tier::kDevice) {
    Queue& queue = backend_.queue(down_);
    queue.offload(copy, home.address.copy, home.planes.bytes());
    queue.synchronize();
  } else if (home.tier == Tier::kHost) {
    std::memcpy(copy, home.address.copy, home.planes.bytes());
  } else {
    std::vector<float> values;
    for (int64_t first = 0; first < home.planes.numel;
         first += static_cast<int64_t>(values.size())) {
      const int64_t left = std::min(kStagedElements, home.planes.numel - first);
      const int64_t offset = home.shard.begin + first;
      values.resize(static_cast<size_t>(std::min(left, numel_at_once(param, offset))));
      for (const Plane plane : {Plane::kMaster, Plane::kExpAvg, Plane::kExpAvgSq}) {
        read(param, plane, offset, values);
        write_plane(home.planes, to, plane, first, values);
      }
    }
  }
  home.tier = Tier::kHost;
  home.host_planes = home.planes;
  home.host_copy_numel = home.planes.numel;
  home.address = to;
}

void StateStore::read_in_place() { homes_ = own_homes_; }

StateAddress StateStore::host_states(int param) const {
  return home(param).tier == Tier::kDevice ? StateAddress{} : home(param).address;
}

int64_t StateStore::numel_at_once(int param, int64_t offset) const {
  offset -= home(param).shard.begin;
  if (offset < home(param).host_planes.numel || tier(param) != Tier::kNvme)
    return home(param).host_planes.numel - offset;
  const int64_t chunk_numel = swap_->chunks(param).front().numel;
  return chunk_numel - offset % chunk_numel;
}

void StateStore::clear() {
  Queue& queue = backend_.queue(QueueKind::kUpload);
  for (Home& home : homes_) {
    if (home.tier == Tier::kDevice) {
      queue.fill_zero(home.address.copy, home.planes.bytes());
      continue;
    }
    if (home.address.copy != nullptr)
      zero(home.address.copy,
           static_cast<size_t>(home.host_copy_numel) * dtype_bytes(home.planes.compute_dtype));
    if (home.address.rest != nullptr) zero(home.address.rest, home.host_planes.rest_bytes);
    for (size_t chunk = 0; chunk < home.is_blank.size(); ++chunk) {
      const int param = static_cast<int>(&home - homes_.data());
      home.is_blank[chunk] = swap_->is_on_nvme(param, swap_->chunks(param)[chunk]);
    }
  }
  loaded_ = {};
  queue.synchronize();
}

void StateStore::zero(std::byte* memory, size_t bytes) const {
  share_between_threads(
      ceil_div(static_cast<int64_t>(bytes), kPartBytes), threads_, [&](int64_t begin, int64_t end) {
        const auto first = static_cast<size_t>(begin * kPartBytes);
        const size_t last = std::min(static_cast<size_t>(end * kPartBytes), bytes);
        std::memset(memory + first, 0, last - first);
      });
}

void StateStore::write_values(const StatePlanes& planes, const StateAddress& base, Plane plane,
                              int64_t offset, std::span<const float> values) const {
  const auto count = static_cast<int64_t>(values.size());
  share_between_threads(ceil_div(count, kPartElements), threads_, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kPartElements;
    const int64_t numel = std::min(end * kPartElements, count) - first;
    write_plane(planes, base, plane, offset + first,
                values.subspan(static_cast<size_t>(first), static_cast<size_t>(numel)));
  });
}

// Calls `use(planes of the staging buffer, its address, first element, elements)` until `count`
// elements have passed.
template <typename Use>
void StateStore::for_staged(const Home& home, size_t count, const Use& use) {
  for (size_t first = 0; first < count; first += static_cast<size_t>(kStagedElements)) {
    const size_t elements = std::min(count - first, static_cast<size_t>(kStagedElements));
    const StatePlanes staged =
        state_planes(static_cast<int64_t>(elements), home.planes.compute_dtype,
                     home.planes.moment_dtype, home.planes.copy_alone);
    staging_.resize(std::max(staging_.size(), staged.bytes()));
    use(staged, state_address(staged, staging_.data()), first, elements);
  }
}

void StateStore::read(int param, Plane plane, int64_t offset, std::span<float> values) {
  const Home& home = this->home(param);
  offset -= home.shard.begin;
  check_range(home.planes, offset, values.size());
  if (home.tier == Tier::kHost) {
    read_plane(home.planes, home.address, plane, offset, values);
  } else if (home.tier == Tier::kNvme) {
    while (!values.empty()) {
      const ChunkPart part = load_part(param, offset, values.size());
      read_plane(part.planes, part.address, plane, part.offset, values.first(part.count));
      values = values.subspan(part.count);
      offset += static_cast<int64_t>(part.count);
    }
  } else {
    Queue& queue = backend_.queue(down_);
    const std::vector<PlanePart> from = plane_parts(home.planes, home.address, plane);
    for_staged(
        home, values.size(),
        [&](const StatePlanes& staged, const StateAddress& address, size_t first, size_t count) {
          const std::vector<PlanePart> to = plane_parts(staged, address, plane);
          for (size_t part = 0; part < to.size(); ++part) {
            const size_t element = to[part].element_bytes;
            queue.offload(to[part].address,
                          from[part].address + (static_cast<size_t>(offset) + first) * element,
                          count * element);
          }
          queue.synchronize();
          read_plane(staged, address, plane, 0, values.subspan(first, count));
        });
  }
}

void StateStore::write(int param, Plane plane, int64_t offset, std::span<const float> values) {
  const Home& home = this->home(param);
  offset -= home.shard.begin;
  check_range(home.planes, offset, values.size());
  if (home.tier == Tier::kHost) {
    write_values(home.planes, home.address, plane, offset, values);
  } else if (home.tier == Tier::kNvme) {
    while (!values.empty()) {
      const ChunkPart part = load_part(param, offset, values.size());
      write_values(part.planes, part.address, plane, part.offset, values.first(part.count));
      loaded_.is_dirty = loaded_.is_dirty || part.is_in_slot;
      values = values.subspan(part.count);
      offset += static_cast<int64_t>(part.count);
    }
  } else {
    Queue& queue = backend_.queue(QueueKind::kUpload);
    const std::vector<PlanePart> to = plane_parts(home.planes, home.address, plane);
    for_staged(
        home, values.size(),
        [&](const StatePlanes& staged, const StateAddress& address, size_t first, size_t count) {
          write_values(staged, address, plane, 0, values.subspan(first, count));
          const std::vector<PlanePart> from = plane_parts(staged, address, plane);
          for (size_t part = 0; part < to.size(); ++part) {
            const size_t element = to[part].element_bytes;
            queue.upload(to[part].address + (static_cast<size_t>(offset) + first) * element,
                         from[part].address, count * element);
          }
          queue.synchronize();
        });
  }
}

void StateStore::read_compute_copy(int param, int64_t offset, std::span<std::byte> out) {
  const Home& home = this->home(param);
  offset -= home.shard.begin;
  const size_t element = dtype_bytes(home.planes.compute_dtype);
  check_range(home.planes, offset, out.size() / element);
  if (home.tier == Tier::kDevice) {
    Queue& queue = backend_.queue(down_);
    queue.offload(out.data(), home.address.copy + static_cast<size_t>(offset) * element,
                  out.size());
    queue.synchronize();
    return;
  }
  const int64_t in_memory = home.host_copy_numel - offset;
  if (in_memory > 0) {
    const size_t bytes = std::min(out.size(), static_cast<size_t>(in_memory) * element);
    std::memcpy(out.data(), home.address.copy + static_cast<size_t>(offset) * element, bytes);
    out = out.subspan(bytes);
    offset += in_memory;
  }
  while (!out.empty()) {
    const ChunkPart part = load_part(param, offset, out.size() / element);
    const size_t bytes = part.count * element;
    std::memcpy(out.data(), part.address.copy + static_cast<size_t>(part.offset) * element, bytes);
    out = out.subspan(bytes);
    offset += static_cast<int64_t>(part.count);
  }
}

// ---------------------------------------------------------------------------------------------------
// Chunks on drives

// Tells where element `offset`, of this rank's part, is, in host memory or, brought there, in the
// slot; `most` elements are wanted.
StateStore::ChunkPart StateStore::load_part(int param, int64_t offset, size_t most) {
  const Home& home = this->home(param);
  ChunkPart part;
  if (offset < home.host_planes.numel) {
    part = {home.host_planes, home.address, offset, 0, false};
  } else {
    const std::vector<StateChunk>& chunks = swap_->chunks(param);
    const StateChunk& chunk =
        chunks[static_cast<size_t>(offset / std::max(chunks.front().numel, int64_t{1}))];
    load_chunk(param, chunk);
    part = {swap_->planes(chunk), swap_->address(param, chunk, slot_, home.address.copy),
            offset - chunk.begin, 0, true};
  }
  part.count = std::min(most, static_cast<size_t>(part.planes.numel - part.offset));
  return part;
}

// Brings the chunk into the slot, unless it is there.
void StateStore::load_chunk(int param, const StateChunk& chunk) {
  const Loaded wanted{param, chunk.index, swap_->versions()[static_cast<size_t>(param)], false};
  if (loaded_.param == param && loaded_.chunk == chunk.index && loaded_.version == wanted.version)
    return;
  write_back();
  loaded_ = {};
  if (home(param).is_blank[static_cast<size_t>(chunk.index)]) {
    for (const SwapPiece& piece : swap_->chunk_pieces(param, chunk, slot_)) {
      std::memset(piece.memory.data(), 0, piece.memory.size());
    }
  } else {
    move_chunk(wanted, false);
  }
  loaded_ = wanted;
}

void StateStore::write_back() {
  if (!loaded_.is_dirty) return;
  move_chunk(loaded_, true);
  loaded_.is_dirty = false;
  homes_[static_cast<size_t>(loaded_.param)].is_blank[static_cast<size_t>(loaded_.chunk)] = false;
}

void StateStore::move_chunk(const Loaded& chunk, bool writes) {
  std::vector<Completion<>> transfers;
  const StateChunk& range = swap_->chunks(chunk.param)[static_cast<size_t>(chunk.chunk)];
  for (const SwapPiece& piece : swap_->chunk_pieces(chunk.param, range, slot_)) {
    Completion<> moved;
    const auto done = [moved](const std::exception_ptr& error) mutable {
      error ? moved.set_error(error) : moved.set_value();
    };
    const nvme::SwapRequest request{piece.key, chunk.version, 0};
    if (writes) {
      swap_->swapper().swap_out(request, piece.memory, done);
    } else {
      swap_->swapper().swap_in(request, piece.memory, done);
    }
    transfers.push_back(moved);
  }
  std::exception_ptr error;
  for (const Completion<>& transfer : transfers) {
    const std::exception_ptr failure = transfer.wait_error();
    if (!error) error = failure;
  }
  if (error) std::rethrow_exception(error);
}

void StateStore::flush() {
  write_back();
  for (size_t param = 0; param < homes_.size(); ++param) {
    const std::vector<bool>& is_blank = homes_[param].is_blank;
    for (size_t chunk = 0; chunk < is_blank.size(); ++chunk) {
      if (!is_blank[chunk]) continue;
      load_chunk(static_cast<int>(param), swap_->chunks(static_cast<int>(param))[chunk]);
      loaded_.is_dirty = true;
      write_back();
    }
  }
}

}  // namespace orlop
