#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "base/completion.h"
#include "engine/swap_lane.h"
#include "memory/host_arena.h"
#include "nvme/aligned_memory.h"
#include "nvme/swapper.h"
#include "optim/optimizer_queue.h"
#include "orlop/weight_drives.h"

namespace orlop {

// What stands behind WeightDrives, and what an optimizer needs whose updates change weights there.
// Called by one thread at a time, the lane's thread and the optimizer's apart.
class WeightSpace {
 public:
  explicit WeightSpace(const StateDrives& drives);
  ~WeightSpace();
  WeightSpace(const WeightSpace&) = delete;
  WeightSpace& operator=(const WeightSpace&) = delete;

  int64_t add(std::span<const DriveWeight> weights);
  void write(int64_t index, std::span<const std::byte> values);
  void read(int64_t index, std::span<std::byte> values);

  void take_slots(size_t count, size_t bytes);
  std::byte* slot(size_t index) const;
  uint32_t fetch(std::span<const int64_t> weights, size_t slot, Fence free);
  Gate fetched() const;
  void wait(uint32_t ticket);
  void synchronize();
  // Waits until no fetch is under way, however it ended.
  void wait_fetches();
  std::vector<std::span<std::byte>> ranges() const;

  // What an optimizer asks. Chunks of every weight have so many bytes, a multiple of
  // kDriveAlignment; its last one may have fewer.
  size_t chunk_bytes() const { return chunk_bytes_; }
  size_t bytes(int64_t index) const { return at(index).bytes; }
  int64_t version(int64_t index) const { return versions_[static_cast<size_t>(index)]; }
  // The transfer of one chunk, which begins at `memory`.
  SwapPiece piece(int64_t index, size_t chunk, std::byte* memory);
  // An update was submitted that makes this version, behind which `gate`, in the memory of `keeps`,
  // opens. No fetch may be under way.
  void expect(int64_t index, Gate gate, uint32_t version, std::shared_ptr<const void> keeps);
  // What updates have written is on the drives. Throws the first error since the last call.
  void flush() { swapper_->flush(); }
  // All updates are over, and their gates go. Waits for what is on its way.
  void end_updates();

 private:
  // The update that a weight waits for.
  struct Updated {
    Gate gate;
    uint32_t version = 0;  // 0: none
    std::shared_ptr<const void> keeps;

    // Throws Error(kIo) for one that failed.
    void wait(const std::string& name) const;
  };
  struct Weight {
    std::string name;
    size_t bytes = 0;
    Updated updated;
  };
  // What a fetch comes behind: the last use of its slot, and the last update of the weight.
  class Turn;
  // A fetch that the lane may not have ended.
  struct Fetch {
    uint32_t ticket = 0;  // of its last swap
    std::vector<std::unique_ptr<Turn>> turns;
    std::vector<SwapLane::Swap> swaps;
  };

  const Weight& at(int64_t index) const;
  size_t count_chunks(int64_t index) const;
  void move(int64_t index, nvme::IoOp op, std::byte* into, const std::byte* from);
  Completion<> start(int64_t index, size_t chunk, nvme::IoOp op, std::byte* memory);
  void forget_ended();

  size_t chunk_bytes_;
  nvme::AlignedMemory staging_;  // of reads and writes between fetches
  std::vector<Weight> weights_;
  std::vector<int64_t> versions_;   // what the chunks of each weight hold, or will
  std::optional<HostArena> arena_;  // a page with the gate of fetches, then the slots
  size_t slot_bytes_ = 0;
  std::vector<uint32_t> slot_tickets_;  // of the last fetch into each slot
  std::deque<Fetch> fetches_;
  std::unique_ptr<nvme::Swapper> swapper_;  // ends before the memory that it moves
  std::unique_ptr<SwapLane> lane_;          // last: it ends before what it uses
};

}  // namespace orlop
