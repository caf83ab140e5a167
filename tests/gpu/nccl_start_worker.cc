// Two ranks of one process, a GPU each, start: each prints "rank R started" when what NCCL did for
// the first time gave what it must, else "rank R told: <error>".

#include <fmt/format.h>

#include <cstdio>
#include <mutex>
#include <string>

#include "comm/thread_communicator.h"
#include "gpu/nccl_communicator.h"
#include "orlop/error.h"

namespace orlop::test {
namespace {

constexpr double kTimeoutSeconds = 60;

std::string start(Communicator& host) {
  try {
    NcclCommunicator comm(host.rank(), host, kTimeoutSeconds);
    comm.prepare_all_to_all();
    comm.barrier("started");
    return "started";
  } catch (const Error& error) {
    return fmt::format("told: {}", error.what());
  }
}

void no_queue(Queue&, const CollectiveCall&) {
  throw Error(ErrorCode::kInternal, "a collective of host memory on a GPU's queue");
}

}  // namespace
}  // namespace orlop::test

int main() {
  std::mutex mutex;
  orlop::run_ranks(2, orlop::test::no_queue, [&](orlop::Communicator& host) {
    const std::string outcome = orlop::test::start(host);
    const std::lock_guard lock(mutex);
    std::puts(fmt::format("rank {} {}", host.rank(), outcome).c_str());
  });
  return 0;
}
