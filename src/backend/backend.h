#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "orlop/types.h"

namespace orlop {

class Ops;
class Tracer;

// A point in a queue's work. record() moves it to the queue's present end; a wait() issued after
// that waits for exactly this point, also when the event is recorded again later. Made once,
// reused.
class Event {
 public:
  virtual ~Event() = default;
  // The calling thread waits. Throws the queue's first asynchronous error.
  virtual void synchronize() = 0;
  virtual bool query() const = 0;
};

// A counter in pinned memory that the host sets and queues wait for: "the optimizer has written
// version N of this parameter". Versions only grow; kFailed opens every wait, the owner of the gate
// then reports the error at its next call. Lives in memory that the backend can reach.
struct Gate {
  static constexpr uint32_t kFailed = 0x7fffffffu;
  std::atomic<uint32_t>* value = nullptr;
};

// What the host does with gates: opens one, and waits for one on the calling thread, which tells
// whether it had to. The caller looks for kFailed.
//
// A sequentially consistent store: notify_all() looks whether anybody waits, and with a weaker one
// the processor may look before it stores, when the other side still reads the old version and goes
// to sleep for ever.
inline void open_gate(const Gate& gate, uint32_t version) {
  gate.value->store(version, std::memory_order_seq_cst);
  gate.value->notify_all();
}
inline bool await_gate(const Gate& gate, uint32_t version) {
  bool waited = false;
  for (uint32_t value = gate.value->load(std::memory_order_acquire); value < version;
       value = gate.value->load(std::memory_order_acquire)) {
    gate.value->wait(value, std::memory_order_acquire);
    waited = true;
  }
  return waited;
}

// An in-order stream of work. Calls only issue work; all pointers stay valid until it has run.
// Called by one thread at a time.
class Queue {
 public:
  virtual ~Queue() = default;
  virtual std::string_view name() const = 0;

  virtual void record(Event& event) = 0;
  virtual void wait(const Event& event) = 0;
  // Later work of this queue waits until *gate.value >= version. The calling thread does not.
  virtual void wait_gate(Gate gate, uint32_t version) = 0;

  virtual void upload(void* device, const void* host, size_t bytes) = 0;
  virtual void offload(void* host, const void* device, size_t bytes) = 0;
  virtual void copy_on_device(void* to, const void* from, size_t bytes) = 0;
  virtual void fill_zero(void* device, size_t bytes) = 0;

  // The calling thread waits for all issued work. Throws the first asynchronous error.
  virtual void synchronize() = 0;
};

// kSave: copies to the host for a save that runs beside the step, from a thread of its own.
enum class QueueKind : uint8_t { kCompute, kUpload, kOffload, kComm, kSave };
inline constexpr int kQueueKinds = 5;

// What a kind of device reaches, from its data sheet; 0: not known.
struct TypicalRates {
  double matmul_flop_per_s = 0;   // large matmuls in 16 bits
  double device_bytes_per_s = 0;  // its memory, read and written
  double link_bytes_per_s = 0;    // from and to pinned memory, one way at a time
};

struct DeviceInfo {
  std::string name;            // "NVIDIA H100 80GB HBM3", "host"
  size_t total_bytes = 0;      // memory of the device
  size_t free_bytes = 0;       // of it free now, before the arena is taken
  size_t overhead_bytes = 0;   // context and libraries, outside the arena, inside the budget
  size_t workspace_bytes = 0;  // matmul and attention workspace: the same in every plan
  bool is_host = false;
  TypicalRates typical = {};
};

// Device memory, queues and operations of one device. All device memory is one arena that is taken
// once; what lies where inside it is the StepPlan's matter. Nothing on the step path allocates.
class Backend {
 public:
  virtual ~Backend() = default;

  virtual DeviceInfo info() const = 0;
  virtual Queue& queue(QueueKind kind) = 0;
  virtual std::unique_ptr<Event> make_event() = 0;
  virtual Ops& ops() = 0;

  // Takes the arena: `bytes` of device memory, aligned to kDeviceAlignment. Once per backend;
  // throws Error(kDoesNotFit) with both numbers when the device has less.
  virtual void* allocate_arena(size_t bytes) = 0;

  // Makes host memory known to the device so that copies from and to it run asynchronously.
  // Page-aligned; undone when the backend is destroyed. A refusal is an Error(kOutOfMemory) that
  // names the amount.
  virtual void register_host_memory(void* address, size_t bytes) = 0;

  // Waits for all queues and throws the first asynchronous error of any.
  virtual void synchronize() = 0;
};

}  // namespace orlop
