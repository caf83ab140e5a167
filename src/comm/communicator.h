#pragma once

#include <cstdint>
#include <span>

#include "orlop/types.h"

namespace orlop {

class Queue;

// Collectives between the ranks of one run. Every rank issues the same sequence of calls with the
// same count and dtype; a disagreement that the implementation can see is an Error(kCommunicator)
// on every rank.
//
// Calls that take a Queue work on device memory, are only issued, and run in the order of the
// queue; all ranks use one queue each. Calls without a Queue work on host values and return when
// they are done; they may be in flight at the same time as those of the queue. Sums run in rank
// order, 16-bit values in fp32 with one rounding at the end, so the bits are fixed by the inputs.
// Counts are in elements.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  // recv (world_size, count) = the send (count) of every rank. In place when send is this rank's
  // row of recv.
  virtual void all_gather(Queue& queue, const void* send, void* recv, int64_t count,
                          DType dtype) = 0;

  // recv (count) = sum over the ranks of row rank() of their send (world_size, count). In place
  // when recv is this rank's row of send; the other rows keep their values.
  virtual void reduce_scatter(Queue& queue, const void* send, void* recv, int64_t count,
                              DType dtype) = 0;

  // buffer (count) of every rank = that of `root`.
  virtual void broadcast(Queue& queue, void* buffer, int64_t count, DType dtype, int root) = 0;

  // values[i] = sum of values[i] over all ranks, in rank order.
  virtual void all_reduce_sum(std::span<double> values) = 0;

  // Returns when every rank has called it.
  virtual void barrier() = 0;
};

}  // namespace orlop
