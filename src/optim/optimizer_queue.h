#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "backend/backend.h"
#include "backend/ops.h"
#include "base/completion.h"
#include "base/trace.h"
#include "cpu_adam/adam.h"
#include "nvme/swapper.h"

namespace orlop {

// A run of elements of one FlatParam that share hyperparameters, in host memory.
struct UpdatePart {
  AdamShard shard;
  bool decay = true;
  uint64_t seed = 0;  // stochastic rounding
};

// One transfer between a drive and host memory.
struct SwapPiece {
  nvme::ChunkKey key;
  std::span<std::byte> memory;
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
  bool opens_gate = false;        // the FlatParam's compute copy is the new one from here on
  bool is_last = false;           // of this FlatParam in the step
};

// The update of every FlatParam that the host updates, in the plan's order.
struct HostUpdates {
  std::vector<UpdateOp> ops;
  std::vector<Gate> gates;  // of those FlatParams
  std::vector<Gate> gate_of_param;
  // Where states are on drives: what moves them, and the version of each FlatParam there, which
  // the queue's thread owns while a job runs.
  nvme::Swapper* swapper = nullptr;
  std::vector<int64_t>* versions = nullptr;
  int slots = 0;
};

// One step's update.
struct UpdateJob {
  StepScalars scalars;      // every gradient is in host memory when they are
  AdamHyper hyper;          // weight_decay applies to parts that decay
  uint32_t version = 0;     // what the gates become
  int64_t engine_step = 0;  // for error messages
};

// Runs host updates on its own thread ("optimizer"), which drives an OpenMP team. A gate opens as
// soon as its FlatParam is written, so that the next forward can start under the rest of the
// update; a compute copy that goes back to a drive may still be on its way there, and a swap-in
// issued behind the gate comes after it. An operation waits for the transfer that its slot is in,
// and for no other. After a failure every gate opens with Gate::kFailed and the next call throws
// the first error.
class OptimizerQueue {
 public:
  // `threads` drive each update.
  OptimizerQueue(HostUpdates updates, int threads, Tracer* tracer);
  ~OptimizerQueue();
  OptimizerQueue(const OptimizerQueue&) = delete;
  OptimizerQueue& operator=(const OptimizerQueue&) = delete;

  // Returns at once; jobs run in order. Throws the first error of an earlier job.
  void submit(const UpdateJob& job);

  // Waits until every submitted job is over and on its drives. Throws the first error.
  void wait_idle();

  // Nothing is queued or runs.
  bool is_idle();

  // Seconds spent inside updates, and waiting for drives, so far.
  double busy_seconds() const { return static_cast<double>(busy_ns_.load()) * 1e-9; }
  double swap_wait_seconds() const { return static_cast<double>(swap_wait_ns_.load()) * 1e-9; }

 private:
  void run();
  void run_job(const UpdateJob& job);
  void run_adam(const UpdateOp& op, const UpdateJob& job);
  void start_transfers(const UpdateOp& op, const UpdateJob& job);
  void wait_slot(int slot);
  std::exception_ptr drain_slot(int slot) noexcept;
  void add_span(const char* what, const UpdateOp& op, Tracer::Clock::time_point begin,
                std::atomic<int64_t>& total);
  void open_all_gates(uint32_t version);

  HostUpdates updates_;
  int threads_;
  Tracer* tracer_;
  std::atomic<int64_t> busy_ns_{0};
  std::atomic<int64_t> swap_wait_ns_{0};
  std::vector<std::vector<Completion<>>> transfers_;  // per slot, under way; the thread's own
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<UpdateJob> jobs_;
  bool running_ = false;
  bool closed_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace orlop
