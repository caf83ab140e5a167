#pragma once

#include "comm/communicator.h"

namespace orlop {

class HostCommunicator;

enum class CollectiveKind : uint8_t {
  kAllGather,
  kReduceScatter,
  kBroadcast,
  kAllReduce,
  kBarrier
};
const char* collective_name(CollectiveKind kind);

// One collective of one rank, plain bytes so that a queue stores it without allocating. Running it
// on the host waits for the other ranks.
struct CollectiveCall {
  CollectiveKind kind = CollectiveKind::kBarrier;
  DType dtype = DType::kF32;
  int root = 0;
  int64_t count = 0;
  const void* send = nullptr;
  void* recv = nullptr;
  HostCommunicator* communicator = nullptr;

  void operator()() const;
};

// A communicator whose buffers the CPU reads and writes: its collectives become host work of the
// queue.
class HostCommunicator : public Communicator {
 public:
  // Makes `call` the next work of the queue; what it throws is the queue's error. Handed in because
  // this layer knows no queue.
  using Issue = void (*)(Queue& queue, const CollectiveCall& call);

  explicit HostCommunicator(Issue issue) : issue_(issue) {}

  void all_gather(Queue& queue, const void* send, void* recv, int64_t count, DType dtype) final;
  void reduce_scatter(Queue& queue, const void* send, void* recv, int64_t count, DType dtype) final;
  void broadcast(Queue& queue, void* buffer, int64_t count, DType dtype, int root) final;

  // Runs a collective of the queue on the calling thread, with all ranks.
  virtual void execute(const CollectiveCall& call) = 0;

 private:
  void issue(Queue& queue, CollectiveCall call);

  Issue issue_;
};

// True for the types that sum_in_order() adds.
bool is_summable(DType dtype);

// to[i] = sum over `from`, in their order, of from[r][i]; the types of up to 32 bits in fp32 with
// one rounding. `to` may be one of `from`.
void sum_in_order(std::span<const void* const> from, void* to, int64_t count, DType dtype);

}  // namespace orlop
