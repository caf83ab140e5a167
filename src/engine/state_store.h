#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "engine/swap_space.h"
#include "zero/param_states.h"
#include "zero/step_plan.h"

namespace orlop {

// Where the arenas of a plan begin.
struct ArenaAddresses {
  std::byte* device = nullptr;
  std::byte* host = nullptr;

  std::byte* of(const PlanBuffer& buffer) const {
    return (buffer.tier == Tier::kDevice ? device : host) + buffer.offset;
  }
};

// The states of every FlatParam, wherever the plan put them, for whoever loads, saves or reads them
// between steps. What lives on the device passes through a small staging buffer, what lives on a
// drive chunk by chunk through a slot of its own. Used by one thread at a time, which makes sure
// that no update is running.
class StateStore {
 public:
  // `swap`: where the states on drives are; null when there are none.
  StateStore(Backend& backend, const PlanInput& input, const StepPlan& plan, SwapSpace* swap,
             const ArenaAddresses& arenas);

  // Of the FlatParam as a whole.
  const StatePlanes& planes(int param) const { return homes_[static_cast<size_t>(param)].planes; }
  bool is_on_nvme(int param) const { return home(param).tier == Tier::kNvme; }

  // Where the planes of a FlatParam lie that the host updates where they are; on drives only
  // `copy`, if at all.
  StateAddress host_states(int param) const;

  // Masters, moments and gaps become zero.
  void clear();

  // Elements [offset, offset + values.size()) of one plane, as read_plane() and write_plane() give
  // and take them. Chunks on drives stay in the slot until another is asked for: accesses that
  // follow the elements, all planes of a piece together, move each chunk once.
  void read(int param, Plane plane, int64_t offset, std::span<float> values);
  void write(int param, Plane plane, int64_t offset, std::span<const float> values);

  // Elements from `offset` on in the compute dtype.
  void read_compute_copy(int param, int64_t offset, std::span<std::byte> out);

  // Brings to the drives what was written. Whoever writes calls it at the end.
  void flush();

 private:
  struct Home {
    StatePlanes planes;
    Tier tier = Tier::kHost;
    StateAddress address;        // on drives: the compute copy if it stays in memory
    std::vector<bool> is_blank;  // per chunk on drives: cleared, and not written since
  };

  // The chunk that is in the slot.
  struct Loaded {
    int param = -1;
    int chunk = -1;
    int64_t version = -1;
    bool is_dirty = false;
  };

  // A part of an access that lies in one chunk.
  struct ChunkPart {
    StatePlanes planes;
    StateAddress address;
    int64_t offset = 0;  // of its first element in the chunk
    size_t count = 0;
  };

  const Home& home(int param) const { return homes_[static_cast<size_t>(param)]; }
  template <typename Use>
  void for_staged(const Home& home, size_t count, const Use& use);
  ChunkPart load_chunk(int param, int64_t offset, size_t most);
  void write_back();
  void move_chunk(const Loaded& chunk, bool writes);

  Backend& backend_;
  SwapSpace* swap_;
  std::byte* slot_ = nullptr;
  std::vector<Home> homes_;
  Loaded loaded_;
  std::vector<std::byte> staging_;
};

}  // namespace orlop
