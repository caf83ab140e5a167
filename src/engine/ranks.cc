#include "engine/ranks.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <exception>
#include <vector>

#include "backend/backend.h"
#include "base/check.h"
#include "comm/single_communicator.h"
#include "cpu_adam/cpu_features.h"
#include "engine/backend_factory.h"
#include "host/host_queue.h"

namespace orlop {
namespace {

// How one rank's work ended, as plain bytes.
struct Outcome {
  double value = 0;
  int32_t failed = 0;
  ErrorCode code = ErrorCode::kInternal;
  std::array<char, 488> text{};
};

Outcome failure(ErrorCode code, const char* what) {
  Outcome outcome;
  outcome.failed = 1;
  outcome.code = code;
  const std::string_view text = what;
  std::copy_n(text.begin(), std::min(text.size(), outcome.text.size() - 1), outcome.text.begin());
  return outcome;
}

std::vector<size_t> values_of_all(Communicator& ranks, std::string_view what, size_t value) {
  std::vector<size_t> all(static_cast<size_t>(ranks.world_size()));
  ranks.all_gather_values(std::as_bytes(std::span(&value, 1)),
                          std::as_writable_bytes(std::span(all)), what);
  return all;
}

// Whether the user has told OpenMP where its threads run.
bool bound_by_openmp() {
  for (const char* name : {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"}) {
    if (process_environment(name)) return true;
  }
  return false;
}

}  // namespace

double sum_over_several_ranks(Communicator& ranks, std::string_view what,
                              const std::function<double()>& work) {
  Outcome own;
  std::exception_ptr error;
  try {
    own.value = work();
  } catch (const Error& thrown) {
    own = failure(thrown.code(), thrown.what());
    error = std::current_exception();
  } catch (const std::exception& thrown) {
    own = failure(ErrorCode::kInternal, thrown.what());
    error = std::current_exception();
  }
  std::vector<Outcome> all(static_cast<size_t>(ranks.world_size()));
  ranks.all_gather_values(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)),
                          what);
  if (error) std::rethrow_exception(error);
  double sum = 0;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    check(all[rank].failed == 0, all[rank].code, "rank {}: {}", rank, all[rank].text.data());
    sum += all[rank].value;
  }
  return sum;
}

size_t least_over_ranks(Communicator& ranks, std::string_view what, size_t value) {
  const std::vector<size_t> all = values_of_all(ranks, what, value);
  return *std::min_element(all.begin(), all.end());
}

size_t most_over_ranks(Communicator& ranks, std::string_view what, size_t value) {
  const std::vector<size_t> all = values_of_all(ranks, what, value);
  return *std::max_element(all.begin(), all.end());
}

LocalRanks local_ranks(Communicator& ranks) {
  struct Place {
    std::array<char, 256> machine{};
    size_t cpus = 0;  // a hash of those that it may run on
  };
  const std::vector<int> allowed = allowed_cpus();
  Place own;
  check(::gethostname(own.machine.data(), own.machine.size() - 1) == 0, ErrorCode::kIo,
        "gethostname: {}", errno_text(errno));
  own.cpus = std::hash<std::string>()(fmt::format("{}", fmt::join(allowed, ",")));
  std::vector<Place> all(static_cast<size_t>(ranks.world_size()));
  ranks.all_gather_values(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)),
                          "machine names");
  LocalRanks local;
  local.count = 0;
  int sharers = 0;
  int index = 0;  // of this rank among them
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const auto first = std::find_if(all.begin(), all.end(), [&](const Place& place) {
      return place.machine == all[rank].machine;
    });
    local.machines.push_back(static_cast<int>(first - all.begin()));
    if (all[rank].machine != own.machine) continue;
    ++local.count;
    if (all[rank].cpus != own.cpus) continue;
    if (static_cast<int>(rank) == ranks.rank()) index = sharers;
    ++sharers;
  }
  local.threads = std::max(1, default_threads() / sharers);
  if (sharers > 1 && !bound_by_openmp()) local.cpus = part_of_cpus(allowed, index, sharers);
  return local;
}

std::unique_ptr<Communicator> one_rank() {
  return std::make_unique<SingleCommunicator>(
      [](Queue& queue, void* to, const void* from, size_t bytes) {
        queue.copy_on_device(to, from, bytes);
      });
}

void issue_on_host_queue(Queue& queue, const CollectiveCall& call) {
  host::host_queue(queue).enqueue(collective_name(call.id.kind), call);
}

std::shared_ptr<Communicator> join_host_ranks() {
  const RankIds ids = read_rank_ids(process_environment);
  if (ids.world_size == 1) return one_rank();
  static const std::shared_ptr<Communicator> joined =
      join_ranks_of(ids, process_environment, {.issue = issue_on_host_queue});
  return joined;
}

RunPart join_ranks(const std::string& device) {
  const RankIds ids = read_rank_ids(process_environment);
  std::shared_ptr<Communicator> host = join_host_ranks();
  if (ids.world_size == 1) return {host, device};
  int gpus = 0;
  on_all_ranks(*host, "devices", [&] {
    check(device == "host" || device == "auto" || device == "cuda", ErrorCode::kUsage,
          "device '{}' in a run of {} ranks; use auto, host or cuda: every rank takes the GPU of "
          "its local rank",
          device, ids.world_size);
    gpus = device == "host" ? 0 : usable_gpus();
    check(device == "host" || gpus == 0 || ids.local_rank < gpus, ErrorCode::kUsage,
          "this machine runs at least {} ranks, but has {} GPUs; start one rank per GPU, or use "
          "--device host",
          ids.local_rank + 1, gpus);
    check(device != "cuda" || gpus > 0, ErrorCode::kDevice,
          "device 'cuda': no usable GPU, or the CUDA part of Orlop cannot be loaded; use --device "
          "host");
  });
  const size_t least = least_over_ranks(*host, "GPUs", gpus > 0 ? 1 : 0);
  const size_t most = most_over_ranks(*host, "GPUs", gpus > 0 ? 1 : 0);
  check(least == most, ErrorCode::kUsage,
        "some of the {} ranks have a GPU and some have none; use --device host on all of them",
        ids.world_size);
  if (least == 0) return {host, "host"};
  return {make_gpu_communicator(ids.local_rank, host), fmt::format("cuda:{}", ids.local_rank)};
}

}  // namespace orlop
