#pragma once

#include <deque>
#include <vector>

#include "zero/step_plan_draft.h"

namespace orlop {

// The inputs of blocks, which backward recomputes them from: where those of a wave are between
// forward and backward, and how they get there and back. The embedding has none; the head's is used
// at once.
class BlockInputs {
 public:
  explicit BlockInputs(StepPlanDraft& draft) : draft_(draft) {}

  void begin_wave(int begin, int end);

  // The buffer on the device; -1: not there.
  int& on_device(int block, int micro_batch) { return at(on_device_, block, micro_batch); }

  // Forward has written it: it goes to where it waits for backward.
  void put_away(int block, int micro_batch);

  // Brings it to the device, if it is not there.
  void bring_back(int block, int micro_batch);

  // Before the backward of (block, micro_batch): brings what that needs after it one ahead to the
  // device, where prefetching is allowed, and further ahead from the drives.
  void bring_ahead(int block, int micro_batch);

 private:
  int& at(std::vector<std::vector<int>>& buffers, int block, int micro_batch) {
    return buffers[static_cast<size_t>(block)][static_cast<size_t>(micro_batch - begin_)];
  }
  // In the order in which backward needs them; the head's micro-batches come before the first.
  int position(int block, int micro_batch) const;
  int last_block() const { return draft_.blocks() - 2; }
  int count() const { return last_block() * (end_ - begin_); }

  int add_on_host(int block, int micro_batch);
  void swap_out(int block, int micro_batch, int on_host);
  void swap_in_until(int position);

  StepPlanDraft& draft_;
  int begin_ = 0;  // micro-batches of the wave
  int end_ = 0;
  std::vector<std::vector<int>> on_device_;  // [block][micro-batch of the wave] buffer
  std::vector<std::vector<int>> on_host_;    // likewise
  std::vector<std::vector<int>> on_drive_;   // likewise
  std::deque<int> going_out_;  // host buffers on their way to drives, the oldest first
  int swapped_in_ = 0;         // by position: those before it are off the drives
};

}  // namespace orlop
