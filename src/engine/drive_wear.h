#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "comm/communicator.h"
#include "engine/ranks.h"
#include "engine/swap_space.h"

namespace orlop {

// What the ranks of a machine move to and from its drives together, and the limit of writes per
// day, which holds for each machine.
class DriveWear {
 public:
  struct Counts {
    uint64_t read = 0;  // since the engine was opened
    uint64_t written = 0;
    uint64_t written_today = 0;  // since midnight UTC; over all runs where a limit is set
  };

  // `swap`: null when nothing is on a drive.
  DriveWear(SwapSpace* swap, Communicator& ranks, const LocalRanks& local,
            std::optional<uint64_t> writes_per_day);

  // Begins a step, on all ranks together. A step that would write more to the drives of one machine
  // than the day allows is refused on all: Error(kDoesNotFit). Nothing has begun then: what is
  // there can be saved.
  void begin_step();

  // Of this machine: this rank's as they are, those of the others as they were when the step began.
  Counts counts() const;

 private:
  // What one rank tells the others.
  struct Share {
    Counts counts;
    uint64_t coming = 0;  // what is to be written by the end of the step that begins
  };

  Counts own() const;
  void check_limit() const;

  SwapSpace* swap_;
  Communicator& ranks_;
  std::vector<int> machines_;
  std::optional<uint64_t> limit_;
  std::vector<Share> shares_;     // per rank, as the last step began
  uint64_t expected_writes_ = 0;  // of this rank, by the end of the last step's update
};

}  // namespace orlop
