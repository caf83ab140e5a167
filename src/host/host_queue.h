#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "backend/backend.h"
#include "host/inline_task.h"

namespace orlop::host {

// How far a queue has come. Shared with the events recorded on it, so that an event may outlive it.
class Progress {
 public:
  // `queue`: its name.
  explicit Progress(const std::string& queue) : wait_name_("wait for " + queue) {}

  // What another queue does that waits for this one, as its trace has it.
  const char* wait_name() const { return wait_name_.c_str(); }

  struct Failure {
    std::exception_ptr error;  // null: none
    uint64_t ticket = 0;       // of the work that failed
    uint64_t order = 0;        // of its occurrence among all queues of the backend
  };

  // The work with this ticket, and all before it, has run (or was skipped after a failure).
  bool reached(uint64_t ticket) const;
  void await(uint64_t ticket) const;
  // The failure of work up to `ticket`.
  Failure failure_until(uint64_t ticket) const;

  void advance();
  // Kept unless an earlier failure is still there.
  void fail(const Failure& failure);
  bool failed() const;
  Failure failure() const;
  // Hands the failure over; the queue executes again.
  Failure take_failure();

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  const std::string wait_name_;
  uint64_t done_ = 0;
  Failure failure_;
};

class HostEvent final : public Event {
 public:
  void synchronize() override;
  bool query() const override;

  struct Point {
    std::shared_ptr<Progress> progress;  // null: never recorded, nothing to wait for
    uint64_t ticket = 0;
  };
  void set(Point point);
  Point point() const;

 private:
  mutable std::mutex mutex_;
  Point point_;
};

// What the queues of one backend share.
struct QueueGroup {
  std::atomic<uint64_t> failures{0};  // so far: tells which of two queues failed first
  std::atomic<bool> stopped{false};   // nothing is executed any more
};

struct HostQueueOptions {
  std::string name;
  int threads = 1;  // of the OpenMP teams that the queue's work starts
  Tracer* tracer = nullptr;
  std::shared_ptr<QueueGroup> group;
};

// A thread that runs closures in the order of issue, from a ring of fixed capacity: issuing into a
// full ring waits. A failed closure leaves its error here; what follows is skipped until the error
// has been thrown by synchronize(). A wait for an event of a failed queue fails the waiting queue
// too.
class HostQueue final : public Queue {
 public:
  static constexpr size_t kCapacity = 1024;

  explicit HostQueue(HostQueueOptions options);
  // Waits for the closure that runs; queued ones are dropped.
  ~HostQueue() override;

  std::string_view name() const override { return options_.name; }
  void record(Event& event) override;
  void wait(const Event& event) override;
  void wait_gate(Gate gate, uint32_t version) override;
  void upload(void* device, const void* host, size_t bytes) override;
  void offload(void* host, const void* device, size_t bytes) override;
  void copy_on_device(void* to, const void* from, size_t bytes) override;
  void fill_zero(void* device, size_t bytes) override;
  void synchronize() override;

  // Issues `work`, a closure of plain bytes that may throw. `name` is a literal.
  template <typename Work>
  void enqueue(const char* name, const Work& work) {
    push(Item{InlineTask(name, work), {}, {}, 0});
  }

  // Waits for all issued work and hands over its failure, if any.
  Progress::Failure drain();
  // Drops what is queued and opens the gate that is waited for; the thread then ends. All queues
  // that wait for each other must be stopped before one is destroyed.
  void stop();

 private:
  struct Item {
    InlineTask task;
    HostEvent::Point event;  // set: wait for it instead of running the task
    Gate gate;               // set: wait for it instead of running the task
    uint32_t version = 0;
  };

  void push(Item item);
  void loop();
  void execute(Item& item);
  void await_gate(const Item& item);
  void fail_with_current_exception(const char* name);

  const HostQueueOptions options_;
  const std::shared_ptr<Progress> progress_;
  int trace_lane_ = 0;

  std::mutex mutex_;
  std::condition_variable not_empty_;
  std::condition_variable not_full_;
  std::vector<Item> ring_;
  size_t head_ = 0;
  size_t count_ = 0;
  uint64_t issued_ = 0;
  uint64_t started_ = 0;  // ticket of the item that runs; the queue's thread only
  std::atomic<std::atomic<uint32_t>*> waited_gate_{nullptr};
  std::thread thread_;
};

// The queue behind the interface; Ops of a host backend are given no other kind.
inline HostQueue& host_queue(Queue& queue) { return static_cast<HostQueue&>(queue); }

}  // namespace orlop::host
