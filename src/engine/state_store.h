#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "zero/param_states.h"
#include "zero/partition.h"
#include "zero/step_plan.h"

namespace orlop {

// Where the arenas of a plan lie.
struct StateArenas {
  std::byte* device = nullptr;
  std::byte* host = nullptr;
};

// This rank's part of the states of every FlatParam, wherever the plan put it, for whoever loads,
// saves or reads states between steps. Offsets count from the start of the FlatParam. What lives on
// the device passes through a small staging buffer. Used by one thread at a time, which makes sure
// that no update is running.
class StateStore {
 public:
  // What lives on the device comes down on queue `down`.
  StateStore(Backend& backend, const PlanInput& input, const StepPlan& plan, int rank,
             const StateArenas& arenas, QueueKind down);

  // Of this rank's part, with its padding.
  const StatePlanes& planes(int param) const { return homes_[static_cast<size_t>(param)].planes; }

  // Elements of the FlatParam that are this rank's.
  const ShardRange& shard(int param) const { return homes_[static_cast<size_t>(param)].shard; }
  // Of elements [offset, offset + numel) those that are this rank's, or another's; numel 0: none.
  ElementRange own_part(int param, int64_t offset, int64_t numel) const {
    return part_of_rank(param, rank_, offset, numel);
  }
  ElementRange part_of_rank(int param, int rank, int64_t offset, int64_t numel) const;

  // The state buffer of a FlatParam that the host updates; null for one that lives on the device.
  std::byte* host_states(int param) const;

  // Masters, moments, gaps and padding become zero.
  void clear();

  // Elements [offset, offset + values.size()) of one plane, as read_plane() and write_plane() give
  // and take them. All of them are this rank's.
  void read(int param, Plane plane, int64_t offset, std::span<float> values);
  void write(int param, Plane plane, int64_t offset, std::span<const float> values);

  // Copies all states of a FlatParam into state_bytes of host memory; reads then come from there,
  // until read_in_place().
  void read_from_copy(int param, std::byte* copy);
  void read_in_place();

  // Elements from `offset` on in the compute dtype.
  void read_compute_copy(int param, int64_t offset, std::span<std::byte> out);

 private:
  struct Home {
    StatePlanes planes;
    int64_t numel = 0;  // of the FlatParam
    ShardRange shard;
    Tier tier = Tier::kHost;
    std::byte* address = nullptr;
  };

  const Home& home(int param) const { return homes_[static_cast<size_t>(param)]; }

  Backend& backend_;
  QueueKind down_;
  int rank_;
  int world_size_;
  std::vector<Home> own_homes_;
  std::vector<Home> homes_;  // of copies, where there are any
  std::vector<std::byte> staging_;
};

}  // namespace orlop
