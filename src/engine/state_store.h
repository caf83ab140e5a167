#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "zero/param_states.h"
#include "zero/step_plan.h"

namespace orlop {

// The states of every FlatParam, wherever the plan put them, for whoever loads, saves or reads them
// between steps. What lives on the device passes through a small staging buffer. Used by one thread
// at a time, which makes sure that no update is running.
class StateStore {
 public:
  // What lives on the device comes down on queue `down`.
  StateStore(Backend& backend, const PlanInput& input, const StepPlan& plan,
             std::byte* device_arena, std::byte* host_arena, QueueKind down);

  const StatePlanes& planes(int param) const { return homes_[static_cast<size_t>(param)].planes; }

  // The state buffer of a FlatParam that the host updates; null for one that lives on the device.
  std::byte* host_states(int param) const;

  // Masters, moments and gaps become zero.
  void clear();

  // Elements [offset, offset + values.size()) of one plane, as read_plane() and write_plane() give
  // and take them.
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
    Tier tier = Tier::kHost;
    std::byte* address = nullptr;
  };

  const Home& home(int param) const { return homes_[static_cast<size_t>(param)]; }

  Backend& backend_;
  QueueKind down_;
  std::vector<Home> own_homes_;
  std::vector<Home> homes_;  // of copies, where there are any
  std::vector<std::byte> staging_;
};

}  // namespace orlop
