#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "engine/swap_space.h"
#include "zero/param_states.h"
#include "zero/partition.h"
#include "zero/step_plan.h"

namespace orlop {

// Where the arenas of a plan begin, and what moves states on drives, by way of a slot.
struct StateMemory {
  std::byte* device = nullptr;
  std::byte* host = nullptr;
  SwapSpace* swap = nullptr;  // null: nothing is on a drive
  std::byte* slot = nullptr;

  std::byte* of(const PlanBuffer& buffer) const {
    return (buffer.tier == Tier::kDevice ? device : host) + buffer.offset;
  }
};

// This rank's part of the states of every FlatParam, wherever the plan put it, for whoever loads,
// saves or reads states between steps. Offsets count from the start of the FlatParam. What lives on
// the device passes through a small staging buffer, what lives on a drive chunk by chunk through a
// slot of its own. Used by one thread at a time, which makes sure
// that no update is running.
class StateStore {
 public:
  // What lives on the device comes down on queue `down`. Up to `threads` write to host memory.
  StateStore(Backend& backend, const PlanInput& input, const StepPlan& plan, int rank,
             const StateMemory& memory, QueueKind down, int threads);

  // Of this rank's part, with its padding.
  const StatePlanes& planes(int param) const { return homes_[static_cast<size_t>(param)].planes; }
  Tier tier(int param) const { return home(param).tier; }

  // Elements of the FlatParam that are this rank's.
  const ShardRange& shard(int param) const { return homes_[static_cast<size_t>(param)].shard; }
  // Of elements [offset, offset + numel) those that are this rank's, or another's; numel 0: none.
  ElementRange own_part(int param, int64_t offset, int64_t numel) const {
    return part_of_rank(param, rank_, offset, numel);
  }
  ElementRange part_of_rank(int param, int rank, int64_t offset, int64_t numel) const;

  // Where the planes of a FlatParam lie that the host updates where they are; of one on drives what
  // stays in host memory, if anything does.
  StateAddress host_states(int param) const;
  // How much of it: planes() or, of a FlatParam on drives, of the chunks that stay.
  const StatePlanes& host_planes(int param) const {
    return homes_[static_cast<size_t>(param)].host_planes;
  }

  // Elements from `offset` on that are moved together: to the end of the chunk on a drive, of what
  // is in host memory, or of this rank's part.
  int64_t numel_at_once(int param, int64_t offset) const;

  // Masters, moments, gaps and padding become zero.
  void clear();

  // Elements [offset, offset + values.size()) of one plane, as read_plane() and write_plane() give
  // and take them. All of them are this rank's. Chunks on drives stay in the slot until another is
  // asked for: accesses that follow the elements, all planes of a piece together, move each once.
  void read(int param, Plane plane, int64_t offset, std::span<float> values);
  void write(int param, Plane plane, int64_t offset, std::span<const float> values);

  // Copies all states of a FlatParam into state_bytes of host memory; reads then come from there,
  // until read_in_place().
  void read_from_copy(int param, std::byte* copy);
  void read_in_place();

  // Elements from `offset` on in the compute dtype.
  void read_compute_copy(int param, int64_t offset, std::span<std::byte> out);

  // Brings to the drives what was written. Whoever writes calls it at the end.
  void flush();

 private:
  struct Home {
    StatePlanes planes;
    int64_t numel = 0;  // of the FlatParam
    ShardRange shard;
    Tier tier = Tier::kHost;
    StateAddress address;         // on drives: what stays in host memory
    StatePlanes host_planes;      // of the first elements, all of whose planes are there
    int64_t host_copy_numel = 0;  // elements whose compute copy is there
    std::vector<bool> is_blank;   // per chunk on drives: cleared, and not written since
  };

  // The chunk that is in the slot.
  struct Loaded {
    int param = -1;
    int chunk = -1;
    int64_t version = -1;
    bool is_dirty = false;
  };

  // A part of an access that lies in one chunk, or in host memory.
  struct ChunkPart {
    StatePlanes planes;
    StateAddress address;
    int64_t offset = 0;  // of its first element there
    size_t count = 0;
    bool is_in_slot = true;
  };

  const Home& home(int param) const { return homes_[static_cast<size_t>(param)]; }
  void write_values(const StatePlanes& planes, const StateAddress& base, Plane plane,
                    int64_t offset, std::span<const float> values) const;
  void zero(std::byte* memory, size_t bytes) const;
  template <typename Use>
  void for_staged(const Home& home, size_t count, const Use& use);
  ChunkPart load_part(int param, int64_t offset, size_t most);
  void load_chunk(int param, const StateChunk& chunk);
  void write_back();
  void move_chunk(const Loaded& chunk, bool writes);

  Backend& backend_;
  QueueKind down_;
  int threads_;
  int rank_;
  int world_size_;
  SwapSpace* swap_;
  std::byte* slot_;
  std::vector<Home> own_homes_;
  std::vector<Home> homes_;  // of copies, where there are any
  Loaded loaded_;
  std::vector<std::byte> staging_;
};

}  // namespace orlop
