#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "backend/backend.h"
#include "backend/ops.h"
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

// One step's update, over all host-resident FlatParams in the order of their next use.
struct UpdateJob {
  StepScalars scalars;      // every gradient is in host memory when they are
  AdamHyper hyper;          // weight_decay applies to parts that decay
  uint32_t version = 0;     // what the gates become
  int64_t engine_step = 0;  // for error messages
  std::shared_ptr<const std::vector<HostUpdate>> updates{};  // instead of the queue's own
};

// Runs host updates on its own thread ("optimizer"), which drives an OpenMP team. A gate opens as
// soon as its FlatParam is written, so that the next forward can start under the rest of the
// update. After a failure every gate opens with Gate::kFailed and the next call throws the first
// error.
class OptimizerQueue {
 public:
  // `updates` in the order of next use. `threads` drive each update.
  OptimizerQueue(std::vector<HostUpdate> updates, int threads, Tracer* tracer);
  ~OptimizerQueue();
  OptimizerQueue(const OptimizerQueue&) = delete;
  OptimizerQueue& operator=(const OptimizerQueue&) = delete;

  // Returns at once; jobs run in order. Throws the first error of an earlier job.
  void submit(const UpdateJob& job);

  // Waits until every submitted job is over. Throws the first error.
  void wait_idle();

  // Seconds spent inside updates so far.
  double busy_seconds() const { return static_cast<double>(busy_ns_.load()) * 1e-9; }

 private:
  void run();
  void run_job(const UpdateJob& job);
  const std::vector<HostUpdate>& updates_of(const UpdateJob& job) const;
  void open_gates(const std::vector<HostUpdate>& updates, uint32_t version);

  std::vector<HostUpdate> updates_;
  int threads_;
  Tracer* tracer_;
  std::atomic<int64_t> busy_ns_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<UpdateJob> jobs_;
  bool running_ = false;
  bool closed_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace orlop
