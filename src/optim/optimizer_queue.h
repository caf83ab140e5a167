#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "backend/backend.h"
#include "backend/ops.h"
#include "base/bounded_queue.h"
#include "base/completion.h"
#include "base/trace.h"
#include "cpu_adam/adam.h"
#include "nvme/swapper.h"

namespace orlop {

// A run of elements of one FlatParam that share hyperparameters, in host memory.
struct UpdatePart {
  AdamShard shard;
  bool decay = true;
  uint64_t seed = 0;                 // stochastic rounding
  std::optional<AdamHyper> hyper{};  // instead of the job's
};

// One transfer between a drive and host memory.
struct SwapPiece {
  nvme::ChunkKey key;
  std::span<std::byte> memory;
  // Whose chunk it is, where that is not the swapper of the updates: a compute copy on drives of
  // its own, which is never blank.
  nvme::Swapper* swapper = nullptr;
};

// One operation of the update on the host. States that are at home in memory are updated by one
// operation; those on drives chunk by chunk, each by three that share a slot.
struct UpdateOp {
  enum class Kind : uint8_t { kAdam, kSwapIn, kSwapOut };

  Kind kind = Kind::kAdam;
  int param = -1;
  int slot = -1;                  // index of the slot; -1: no drive takes part
  std::vector<UpdatePart> parts;  // kAdam
  std::vector<SwapPiece> pieces;  // kSwapIn, kSwapOut
  bool is_last = false;           // of this FlatParam: with it its gate opens
  // Of a swap whose chunk may never have been written: whether that is so. Such a chunk comes in as
  // zeros, without its drive, and is no longer blank once it goes out. The queue's thread alone
  // uses it while updates run.
  bool* is_blank = nullptr;
};

// An operation that is made for one job alone.
struct HostUpdate {
  UpdateOp op;
  Gate gate;
  std::function<void()> prepare{};  // runs before an update, on the queue's thread; may be empty
};

// They run in order.
struct UpdateBatch {
  StepScalars scalars;
  std::vector<HostUpdate> updates;
};

// The host updates of a plan, in its order.
struct HostUpdates {
  std::vector<UpdateOp> ops;
  std::vector<Gate> gates;  // per FlatParam
  // Where states are on drives: what moves them, and the version of each FlatParam there. The
  // queue's thread writes it before it opens the gate.
  nvme::Swapper* swapper = nullptr;
  std::vector<int64_t>* versions = nullptr;
  int slots = 0;
};

// One operation in one step.
struct UpdateJob {
  int op = -1;  // of HostUpdates::ops
  // Gradient and scalars are in host memory when these have run. They may not be recorded again
  // before the gate is open.
  std::array<Event*, 4> arrivals{};
  // A save that still reads the FlatParam holds the update until this gate has this version.
  Gate saved;
  uint32_t saved_version = 0;                  // 0: none
  const StepScalars* scalars = nullptr;        // in host memory; of kAdam
  AdamHyper hyper;                             // weight_decay applies to parts that decay
  uint32_t version = 0;                        // what the gate becomes
  std::shared_ptr<const UpdateBatch> batch{};  // instead of `op`
};

// Runs host updates on its own thread ("optimizer"), which waits for their gradients and drives an
// OpenMP team. A gate opens as soon as its FlatParam is written, or is to stay as it is, so that
// the next forward can start under the rest of the updates; what goes back to a drive may still be
// on its way there, and a swap-in that is issued behind the gate comes after it. An operation waits
// for the transfer that its slot is in, and for no other. After a failure every gate opens with
// Gate::kFailed, further updates are left out, and the next call throws the first error.
class OptimizerQueue {
 public:
  // `threads` drive each update. So many jobs can wait as two steps of `updates` have, or 1024
  // batches without them.
  OptimizerQueue(HostUpdates updates, int threads, Tracer* tracer);
  ~OptimizerQueue();
  OptimizerQueue(const OptimizerQueue&) = delete;
  OptimizerQueue& operator=(const OptimizerQueue&) = delete;

  // Returns at once, unless too many jobs wait; jobs run in order. Throws the first error of an
  // earlier job.
  void submit(const UpdateJob& job);

  // Waits until every submitted job is over, and on its drives. Throws the first error.
  void wait_idle();

  // Seconds spent inside updates, and waiting for drives, so far.
  double busy_seconds() const { return static_cast<double>(busy_ns_.load()) * 1e-9; }
  double swap_wait_seconds() const { return static_cast<double>(swap_wait_ns_.load()) * 1e-9; }
  // Seconds that updates were held by saves.
  double held_seconds() const { return static_cast<double>(held_ns_.load()) * 1e-9; }

 private:
  // A slot as the queue's thread knows it.
  struct Slot {
    std::vector<Completion<>> transfers;  // under way
    bool is_unchanged = false;            // by the update that was left out: nothing to write
  };

  void run();
  void run_job(const UpdateJob& job);
  void run_op(const UpdateOp& op, const Gate& gate, const std::function<void()>& prepare,
              const UpdateJob& job);
  void run_adam(int param, std::span<const UpdatePart> parts, const UpdateJob& job);
  void start_transfers(const UpdateOp& op, const UpdateJob& job);
  void wait_slot(const UpdateOp& op);
  void fail(std::exception_ptr error);
  void await_save(const UpdateOp& op, const UpdateJob& job);
  void add_span(const char* what, int param, Tracer::Clock::time_point begin,
                std::atomic<int64_t>& total);

  HostUpdates updates_;
  int threads_;
  Tracer* tracer_;
  std::atomic<int64_t> busy_ns_{0};
  std::atomic<int64_t> swap_wait_ns_{0};
  std::atomic<int64_t> held_ns_{0};
  std::vector<Slot> slots_;
  BoundedQueue<UpdateJob> jobs_;
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t submitted_ = 0;
  uint64_t finished_ = 0;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace orlop
