#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "backend/backend.h"
#include "base/bounded_queue.h"
#include "nvme/swapper.h"
#include "optim/optimizer_queue.h"

namespace orlop {

// What goes one way between host memory and the drives during a walk, in order: compute copies and
// block inputs that come in, or block inputs that go out. Its thread waits for what each operation
// waits for, so that the main thread does not; a gate in pinned memory counts the operations that
// have ended, and queues wait for it. After a failure the gate opens with Gate::kFailed and what
// follows is left out.
class SwapLane {
 public:
  // One operation, as it is in every walk.
  struct Swap {
    nvme::IoOp op = nvme::IoOp::kRead;
    std::string what;  // "block input of layer.3, micro-batch 1"
    int param = -1;  // its compute copy as the last update made it; -1: a block input of this walk
    std::vector<SwapPiece> pieces;
    std::vector<Event*> after;     // what used the memory before
    int after_other = -1;          // operation of the plan on the other lane that did, or -1
    int after_update = -1;         // FlatParam whose update of this step did, or -1
    int after_update_before = -1;  // FlatParam whose update of the step before must be over
  };

  // How an operation is to run in one walk.
  struct Turn {
    uint32_t version = 0;       // what the step before made of FlatParams
    bool updates = true;        // false: no update is waited for
    bool skips = false;         // nothing is moved, because its micro-batch is missing
    uint32_t other_ticket = 0;  // of after_other, on the other lane
    const SwapLane* other = nullptr;
  };

  // `name`: of the thread. `updated`: per FlatParam, the gate that says which version is on its way
  // to the drives. `versions`: of the FlatParams there, readable behind their gates.
  SwapLane(const char* name, nvme::Swapper& swapper, std::vector<Gate> updated,
           const std::vector<int64_t>& versions, Gate ended);
  ~SwapLane();
  SwapLane(const SwapLane&) = delete;
  SwapLane& operator=(const SwapLane&) = delete;

  // Returns at once, unless very many wait. `swap` stays until it has ended, which it has when the
  // gate has reached the number returned, its ticket.
  uint32_t issue(const Swap& swap, const Turn& turn);

  Gate ended() const { return ended_; }

  // Waits until all have ended.
  void wait_ended();
  // Throws the first error; none when what an operation waited for has failed, which is for those
  // to report.
  void rethrow();

 private:
  struct Item {
    const Swap* swap = nullptr;
    Turn turn;
    uint32_t ticket = 0;
  };

  void run();
  void start(const Item& item);
  void start_piece(const Item& item, const SwapPiece& piece);
  bool await_all(const Item& item) const;
  bool has_failed();
  void fail(std::exception_ptr error);
  void end_part(uint32_t ticket);

  nvme::Swapper& swapper_;
  const std::vector<Gate> updated_;
  const std::vector<int64_t>& versions_;
  const Gate ended_;
  BoundedQueue<Item> items_;
  std::mutex mutex_;  // guards the rest
  std::condition_variable changed_;
  std::deque<size_t> parts_left_;  // of the tickets behind last_ended_, in order
  uint32_t issued_ = 0;
  uint32_t last_ended_ = 0;
  bool failed_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace orlop
