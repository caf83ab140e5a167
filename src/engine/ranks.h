#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/rendezvous.h"

namespace orlop {

// Runs `work` on every rank and returns the sum, in rank order, of what it gives. When it throws on
// one rank, every rank throws: that one its own error, the others the first one's with its rank.
double sum_over_several_ranks(Communicator& ranks, std::string_view what,
                              const std::function<double()>& work);
template <typename Work>
double sum_over_ranks(Communicator& ranks, std::string_view what, const Work& work) {
  if (ranks.world_size() == 1) return work();
  return sum_over_several_ranks(ranks, what, std::ref(work));
}

// The same for work that gives nothing.
template <typename Work>
void on_all_ranks(Communicator& ranks, std::string_view what, const Work& work) {
  sum_over_ranks(ranks, what, [&] {
    work();
    return 0.0;
  });
}

// The smallest, and the largest, of the ranks' values.
size_t least_over_ranks(Communicator& ranks, std::string_view what, size_t value);
size_t most_over_ranks(Communicator& ranks, std::string_view what, size_t value);

// The ranks on the machine of this one.
struct LocalRanks {
  int count = 1;
  // What ranks share that may run on the same logical CPUs is cut into one part for each: the
  // threads of this rank, and the CPUs for them. Empty: whatever this thread may run on.
  int threads = 1;
  std::vector<int> cpus;
  std::vector<int> machines;  // per rank: the first rank on the same machine
};
LocalRanks local_ranks(Communicator& ranks);

// A run of one rank.
std::unique_ptr<Communicator> one_rank();

// Makes a collective the next work of a queue of the host's backend.
void issue_on_host_queue(Queue& queue, const CollectiveCall& call);

// The ranks that this process belongs to, as its launcher's environment says, on host memory; one
// rank without a launcher. Joined at the first call, for the life of the process.
std::shared_ptr<Communicator> join_host_ranks();

// This process's part in a run.
struct RunPart {
  std::shared_ptr<Communicator> ranks;
  std::string device;  // of this rank: with several, each takes a GPU of its own
};

// The ranks on the device that a configuration names: "host", "cuda" or "auto", or with one rank
// any. Several ranks must all have GPUs, or none of them uses one.
RunPart join_ranks(const std::string& device);

}  // namespace orlop
