#include "engine/measure_collectives.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "base/bytes.h"
#include "comm/thread_communicator.h"
#include "engine/backend_factory.h"
#include "engine/ranks.h"

namespace orlop {
namespace {

constexpr size_t kPartBytes = 64 * kMiB;  // of a rank: a block of a large model
constexpr size_t kHostPartBytes = 1 * kMiB;
constexpr int kRounds = 9;

// Seconds of one all_gather, as this rank sees it.
double seconds_of_rank(Communicator& host, const std::string& device) {
  EngineConfig config;
  config.device = device;
  std::shared_ptr<Communicator> ranks(std::shared_ptr<void>(), &host);
  if (device != "host") {
    config.device = fmt::format("cuda:{}", host.rank());
    ranks = make_gpu_communicator(host.rank(), ranks);
  }
  const BackendChoice choice = make_backend(config, host.world_size(), 1, nullptr);
  const size_t part = device == "host" ? kHostPartBytes : kPartBytes;
  auto* all = static_cast<std::byte*>(
      choice.backend->allocate_arena(part * static_cast<size_t>(host.world_size())));
  const std::byte* own = all + part * static_cast<size_t>(host.rank());
  Queue& queue = choice.backend->queue(QueueKind::kComm);
  std::vector<double> seconds;
  for (int round = 0; round < kRounds; ++round) {
    host.barrier("measuring collectives");
    const auto begin = std::chrono::steady_clock::now();
    ranks->all_gather(queue, own, all, static_cast<int64_t>(part / dtype_bytes(DType::kBF16)),
                      DType::kBF16, "measuring");
    queue.synchronize();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    if (round > 0) seconds.push_back(taken.count());  // the first one meets cold memory
  }
  std::nth_element(seconds.begin(), seconds.begin() + kRounds / 2, seconds.end());
  return seconds[kRounds / 2];
}

}  // namespace

double measure_collectives(const std::string& device, int ranks) {
  std::vector<double> seconds(static_cast<size_t>(ranks));
  run_ranks(ranks, issue_on_host_queue, [&](Communicator& host) {
    seconds[static_cast<size_t>(host.rank())] = seconds_of_rank(host, device);
  });
  const size_t received =
      (device == "host" ? kHostPartBytes : kPartBytes) * static_cast<size_t>(ranks - 1);
  return static_cast<double>(received) / *std::max_element(seconds.begin(), seconds.end());
}

}  // namespace orlop
