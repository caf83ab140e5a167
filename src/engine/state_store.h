#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "zero/param_states.h"
#include "zero/step_plan.h"

namespace orlop {

// The states of every FlatParam, wherever the plan put them, as host memory for whoever loads, saves or
// reads them between steps. What lives on the device is copied to a staging buffer meanwhile.
class StateStore {
 public:
  StateStore(Backend& backend, const PlanInput& input, const StepPlan& plan, std::byte* device_arena,
             std::byte* host_arena);

  const StatePlanes& planes(int param) const { return homes_[static_cast<size_t>(param)].planes; }

  // The state buffer of a FlatParam that the host updates; null for one that lives on the device.
  std::byte* host_states(int param) const;

  // Calls use(states) with one FlatParam's state buffer in host memory. With `write`, changes reach the
  // device before the call returns. The caller makes sure that no update is running.
  void with_states(int param, bool write, const std::function<void(std::byte* states)>& use);

 private:
  struct Home {
    StatePlanes planes;
    Tier tier = Tier::kHost;
    std::byte* address = nullptr;
  };

  Backend& backend_;
  std::vector<Home> homes_;
  std::vector<std::byte> staging_;
};

}  // namespace orlop
