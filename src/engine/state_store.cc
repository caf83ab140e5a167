#include "engine/state_store.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace orlop {
namespace {

// What passes through staging at once: 14 bytes per element at most.
constexpr int64_t kStagedElements = int64_t{1} << 18;

}  // namespace

StateStore::StateStore(Backend& backend, const PlanInput& input, const StepPlan& plan, int rank,
                       const StateArenas& arenas, QueueKind down)
    : backend_(backend),
      down_(down),
      rank_(rank),
      world_size_(input.world_size),
      homes_(input.layout.flat_params.size()) {
  for (const PlanBuffer& buffer : plan.buffers) {
    if (buffer.kind != BufferKind::kState) continue;
    Home& home = homes_[static_cast<size_t>(buffer.param)];
    home.planes =
        state_planes(input.shard_numel(buffer.param), input.compute_dtype, input.moment_dtype);
    home.numel = input.layout.flat_params[static_cast<size_t>(buffer.param)].numel;
    home.shard = shard_range(home.numel, rank, input.world_size);
    home.tier = buffer.tier;
    home.address = (buffer.tier == Tier::kDevice ? arenas.device : arenas.host) + buffer.offset;
  }
  own_homes_ = homes_;
}

ElementRange StateStore::part_of_rank(int param, int rank, int64_t offset, int64_t numel) const {
  const ShardRange shard = shard_range(home(param).numel, rank, world_size_);
  return intersect({offset, numel}, {shard.begin, shard.numel});
}

void StateStore::read_from_copy(int param, std::byte* copy) {
  Home& home = homes_[static_cast<size_t>(param)];
  if (home.tier == Tier::kHost) {
    std::memcpy(copy, home.address, home.planes.bytes);
  } else {
    Queue& queue = backend_.queue(down_);
    queue.offload(copy, home.address, home.planes.bytes);
    queue.synchronize();
  }
  home.tier = Tier::kHost;
  home.address = copy;
}

void StateStore::read_in_place() { homes_ = own_homes_; }

std::byte* StateStore::host_states(int param) const {
  return home(param).tier == Tier::kHost ? home(param).address : nullptr;
}

void StateStore::clear() {
  Queue& queue = backend_.queue(QueueKind::kUpload);
  for (const Home& home : homes_) {
    if (home.tier == Tier::kHost) {
      std::memset(home.address, 0, home.planes.bytes);
    } else {
      queue.fill_zero(home.address, home.planes.bytes);
    }
  }
  queue.synchronize();
}

void StateStore::read(int param, Plane plane, int64_t offset, std::span<float> values) {
  const Home& home = this->home(param);
  offset -= home.shard.begin;
  if (home.tier == Tier::kHost) {
    read_plane(home.planes, home.address, plane, offset, values);
    return;
  }
  check_range(home.planes, offset, values.size());
  Queue& queue = backend_.queue(down_);
  while (!values.empty()) {
    const size_t count = std::min(values.size(), static_cast<size_t>(kStagedElements));
    const StatePlanes staged = state_planes(static_cast<int64_t>(count), home.planes.compute_dtype,
                                            home.planes.moment_dtype);
    staging_.resize(std::max(staging_.size(), staged.bytes));
    const std::vector<PlanePart> from = plane_parts(home.planes, plane);
    const std::vector<PlanePart> to = plane_parts(staged, plane);
    for (size_t part = 0; part < to.size(); ++part) {
      const size_t element = to[part].element_bytes;
      queue.offload(staging_.data() + to[part].offset,
                    home.address + from[part].offset + static_cast<size_t>(offset) * element,
                    count * element);
    }
    queue.synchronize();
    read_plane(staged, staging_.data(), plane, 0, values.first(count));
    values = values.subspan(count);
    offset += static_cast<int64_t>(count);
  }
}

void StateStore::write(int param, Plane plane, int64_t offset, std::span<const float> values) {
  const Home& home = this->home(param);
  offset -= home.shard.begin;
  if (home.tier == Tier::kHost) {
    write_plane(home.planes, home.address, plane, offset, values);
    return;
  }
  check_range(home.planes, offset, values.size());
  Queue& queue = backend_.queue(QueueKind::kUpload);
  while (!values.empty()) {
    const size_t count = std::min(values.size(), static_cast<size_t>(kStagedElements));
    const StatePlanes staged = state_planes(static_cast<int64_t>(count), home.planes.compute_dtype,
                                            home.planes.moment_dtype);
    staging_.resize(std::max(staging_.size(), staged.bytes));
    write_plane(staged, staging_.data(), plane, 0, values.first(count));
    const std::vector<PlanePart> from = plane_parts(staged, plane);
    const std::vector<PlanePart> to = plane_parts(home.planes, plane);
    for (size_t part = 0; part < to.size(); ++part) {
      const size_t element = to[part].element_bytes;
      queue.upload(home.address + to[part].offset + static_cast<size_t>(offset) * element,
                   staging_.data() + from[part].offset, count * element);
    }
    queue.synchronize();
    values = values.subspan(count);
    offset += static_cast<int64_t>(count);
  }
}

void StateStore::read_compute_copy(int param, int64_t offset, std::span<std::byte> out) {
  const Home& home = this->home(param);
  offset -= home.shard.begin;
  if (home.tier == Tier::kHost) {
    orlop::read_compute_copy(home.planes, home.address, offset, out);
    return;
  }
  const size_t element = dtype_bytes(home.planes.compute_dtype);
  check_range(home.planes, offset, out.size() / element);
  Queue& queue = backend_.queue(down_);
  queue.offload(out.data(), home.address + static_cast<size_t>(offset) * element, out.size());
  queue.synchronize();
}

}  // namespace orlop
