#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
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
#include "base/trace.h"
#include "cpu_adam/adam.h"

namespace orlop {

// A run of elements of one FlatParam that share hyperparameters, in host memory.
struct UpdatePart {
  AdamShard shard;
  bool decay = true;
  uint64_t seed = 0;                 // stochastic rounding
  std::optional<AdamHyper> hyper{};  // instead of the job's
};

// What the host updates of one FlatParam are made of.
struct HostUpdate {
  int param = -1;
  std::vector<UpdatePart> parts;
  Gate gate;
  std::function<void()> prepare{};  // runs first, on the optimizer's thread; may be empty
};

// Updates that are made for one job alone; they run in order.
struct UpdateBatch {
  StepScalars scalars;
  std::vector<HostUpdate> updates;
};

// One FlatParam's update in one step, or those of a batch.
struct UpdateJob {
  int param = -1;
  // Gradient and scalars are in host memory when these have run. They may not be recorded again
  // before the gate is open.
  std::array<Event*, 3> arrivals{};
  // A save that still reads the FlatParam holds the update until this gate has this version.
  Gate saved;
  uint32_t saved_version = 0;                  // 0: none
  const StepScalars* scalars = nullptr;        // in host memory
  AdamHyper hyper;                             // weight_decay applies to parts that decay
  uint32_t version = 0;                        // what the gate becomes
  std::shared_ptr<const UpdateBatch> batch{};  // instead of the queue's own update of `param`
};

// Runs host updates on its own thread ("optimizer"), which waits for their gradients and drives an
// OpenMP team. A gate opens as soon as its FlatParam is written, or is to stay as it is, so that
// the next forward can start under the rest of the updates. After a failure every gate opens with
// Gate::kFailed, further updates are left out, and the next call throws the first error.
class OptimizerQueue {
 public:
  // `threads` drive each update. So many jobs can wait as two steps of `updates` have, and 1024
  // batches beside them.
  OptimizerQueue(std::vector<HostUpdate> updates, int threads, Tracer* tracer);
  ~OptimizerQueue();
  OptimizerQueue(const OptimizerQueue&) = delete;
  OptimizerQueue& operator=(const OptimizerQueue&) = delete;

  // Returns at once, unless too many jobs wait; jobs run in order. Throws the first error of an
  // earlier job.
  void submit(const UpdateJob& job);

  // Waits until every submitted job is over. Throws the first error.
  void wait_idle();

  // Seconds spent inside updates so far.
  double busy_seconds() const { return static_cast<double>(busy_ns_.load()) * 1e-9; }
  // Seconds that updates were held by saves.
  double held_seconds() const { return static_cast<double>(held_ns_.load()) * 1e-9; }

 private:
  void run();
  void run_job(const UpdateJob& job);
  void run_update(const HostUpdate& update, const UpdateJob& job);
  std::span<const HostUpdate> updates_of(const UpdateJob& job) const;
  void await_save(const UpdateJob& job);
  void add_span(const char* what, int param, Tracer::Clock::time_point begin,
                std::atomic<int64_t>& total);

  std::vector<HostUpdate> updates_;
  std::vector<const HostUpdate*> update_of_;  // FlatParam -> its update, or null
  int threads_;
  Tracer* tracer_;
  std::atomic<int64_t> busy_ns_{0};
  std::atomic<int64_t> held_ns_{0};
  BoundedQueue<UpdateJob> jobs_;
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t submitted_ = 0;
  uint64_t finished_ = 0;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace orlop
