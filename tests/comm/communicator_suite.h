#pragma once

#include <cstddef>
#include <vector>

#include "backend/backend.h"
#include "comm/communicator.h"

namespace orlop::test {

// Large and small values of both signs, a pure function of `rank`: their fp32 sum depends on the
// order.
std::vector<float> values_of_rank(int rank, size_t numel);

// What every communicator does, on host memory: each function is called by all ranks with a queue
// of their own and compares every element with what the definition says.
void expect_all_gather(Communicator& comm, Queue& queue);
void expect_reduce_scatter(Communicator& comm, Queue& queue);
void expect_sixteen_bit_sums_round_once(Communicator& comm, Queue& queue);
void expect_all_to_all(Communicator& comm, Queue& queue);
void expect_broadcast(Communicator& comm, Queue& queue);
void expect_host_values_beside_the_queue(Communicator& comm, Queue& queue);

}  // namespace orlop::test
