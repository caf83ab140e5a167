#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "backend/backend.h"
#include "base/bounded_queue.h"
#include "nvme/swapper.h"
#include "optim/optimizer_queue.h"

namespace orlop {

// The swap-ins of compute copies during a walk, in order. Its thread ("swap") waits for what each
// waits for, so that the main thread does not; a gate in pinned memory counts the swap-ins that
// have ended, and queues wait for it. After a failure the gate opens with Gate::kFailed and what
// follows is left out.
class SwapLane {
 public:
  // One operation, as it is in every walk.
  struct SwapIn {
    int param = -1;
    std::vector<SwapPiece> pieces;
    std::vector<Event*> after;     // what used the memory before
    int after_update = -1;         // FlatParam whose update of this step did, or -1
    int after_update_before = -1;  // FlatParam whose update of the step before must be over
  };

  // `updated`: per FlatParam, the gate that says which version is on its way to the drives.
  // `versions`: of the FlatParams there, readable behind their gates. `capacity`: operations that
  // may be issued and not ended.
  SwapLane(nvme::Swapper& swapper, std::vector<Gate> updated, const std::vector<int64_t>& versions,
           Gate ended, size_t capacity);
  ~SwapLane();
  SwapLane(const SwapLane&) = delete;
  SwapLane& operator=(const SwapLane&) = delete;

  // Returns at once. `version`: what the step before made of FlatParams; without `updates` no
  // update is waited for. `swap_in` stays until it has ended, which it has when the gate has
  // reached the number returned.
  uint32_t issue(const SwapIn& swap_in, uint32_t version, bool updates);

  Gate ended() const { return ended_; }

  // Waits until all have ended. Throws the first error; none when an update has failed, which is
  // the optimizer's to report.
  void drain();

 private:
  struct Item {
    const SwapIn* swap_in = nullptr;
    uint32_t version = 0;
    bool updates = true;
    uint32_t ticket = 0;
  };

  void run();
  void start(const Item& item);
  bool await_updates(const Item& item) const;
  void fail(std::exception_ptr error);
  void end_piece(uint32_t ticket);

  nvme::Swapper& swapper_;
  const std::vector<Gate> updated_;
  const std::vector<int64_t>& versions_;
  const Gate ended_;
  BoundedQueue<Item> items_;
  std::mutex mutex_;  // guards the rest
  std::condition_variable changed_;
  std::vector<size_t> pieces_left_;  // of ticket t at t % capacity
  uint32_t issued_ = 0;
  uint32_t last_ended_ = 0;
  bool failed_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace orlop
