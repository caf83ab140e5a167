#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "orlop/types.h"

namespace orlop {

class Queue;

// Collectives between the ranks of one run. Every rank issues the same sequence of calls with the
// same count and dtype; a disagreement that the implementation can see is an Error(kCommunicator)
// on every rank. After an error every further call throws it again.
//
// Calls that take a Queue work on device memory, are only issued, and run in the order of the
// queue; all ranks use one queue each. Calls without a Queue work on host values and return when
// they are done; they may be in flight at the same time as those of the queue. Sums of
// host memory run in rank order, 16-bit values in fp32 with one rounding at the end, so the bits
// are fixed by the inputs; a device may sum in another order that count and ranks fix. Counts are
// in elements. `what` says in errors what the values belong to ("layer.7").
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  // recv (world_size, count) = the send (count) of every rank. In place when send is this rank's
  // row of recv.
  virtual void all_gather(Queue& queue, const void* send, void* recv, int64_t count, DType dtype,
                          std::string_view what) = 0;

  // recv (count) = sum over the ranks of row rank() of their send (world_size, count). In place
  // when recv is this rank's row of send; the other rows keep their values.
  virtual void reduce_scatter(Queue& queue, const void* send, void* recv, int64_t count,
                              DType dtype, std::string_view what) = 0;

  // Row r of recv (world_size, count) = row rank() of send (world_size, count) of rank r. The two
  // are different memory.
  virtual void all_to_all(Queue& queue, const void* send, void* recv, int64_t count, DType dtype,
                          std::string_view what) = 0;

  // Takes now what the first all_to_all would take besides the caller's memory: before a device's
  // budget is measured. Every rank calls it.
  virtual void prepare_all_to_all() {}

  // buffer (count) of every rank = that of `root`.
  virtual void broadcast(Queue& queue, void* buffer, int64_t count, DType dtype, int root,
                         std::string_view what) = 0;

  // Host values: recv (world_size, send.size()) = the bytes of every rank.
  virtual void all_gather_values(std::span<const std::byte> send, std::span<std::byte> recv,
                                 std::string_view what) = 0;

  // Host values: the bytes of every rank = those of `root`.
  virtual void broadcast_values(std::span<std::byte> values, int root, std::string_view what) = 0;

  // The same ranks for a second thread, whose host values may be in flight beside those of this
  // one. For host values only; lives as long as this.
  virtual Communicator& beside() = 0;

  // Tells all ranks that this one cannot go on: their calls, waiting or to come, throw
  // Error(kCommunicator) with `reason`. Any thread may call it; the first reason counts.
  virtual void abort(const std::string& reason) noexcept = 0;

  // The error that every further call throws, or "". Does not wait; any thread may call it.
  virtual std::string failure() const = 0;

  // values[i] = sum of values[i] over all ranks, in rank order.
  void all_reduce_sum(std::span<double> values, std::string_view what);

  // Returns when every rank has called it.
  void barrier(std::string_view what);
};

}  // namespace orlop
