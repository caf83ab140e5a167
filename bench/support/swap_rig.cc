#include "bench/support/swap_rig.h"

#include <sys/resource.h>

#include <chrono>
#include <cstring>
#include <random>

namespace orlop::bench {
namespace {

constexpr size_t kSlots = 6;

double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

nvme::SwapperOptions swapper_options(const SwapRigOptions& options, int32_t chunks) {
  nvme::SwapperOptions made;
  made.directories = options.directories;
  for (int32_t i = 0; i < chunks; ++i) made.chunks.push_back({{i, 0}, options.chunk_bytes});
  made.queue = options.queue;
  made.engine = options.engine;
  made.direct = options.direct;
  made.verify = nvme::Verify::kOff;
  return made;
}

}  // namespace

SwapRig::SwapRig(const SwapRigOptions& options)
    : chunk_bytes_(options.chunk_bytes),
      chunks_(static_cast<int32_t>(options.bytes / options.chunk_bytes)),
      arena_(kSlots * chunk_bytes_),
      memory_(arena_.carve(kSlots * chunk_bytes_, "slots", kPageBytes)),
      pool_("bench", memory_, chunk_bytes_),
      swapper_(swapper_options(options, chunks_)) {
  swapper_.register_memory(memory_, chunk_bytes_);
  // Random bytes, as fio writes them: some drives are faster with zeros.
  std::mt19937_64 random(1);
  for (size_t i = 0; i < memory_.size(); i += sizeof(uint64_t)) {
    const uint64_t value = random();
    std::memcpy(memory_.data() + i, &value, sizeof value);
  }
  run(Pattern::kWrite);  // turns allocated blocks into written ones
}

Figure SwapRig::run(Pattern pattern) {
  const double cpu_before = cpu_seconds();
  const auto begin = std::chrono::steady_clock::now();
  ++step_;
  std::vector<Completion<SlotLease>> reads;
  for (int32_t i = 0; i < chunks_; ++i) {
    const bool read = pattern == Pattern::kRead || (pattern == Pattern::kMixed && i % 2 == 0);
    if (read) {
      if (reads.size() == kSlots / 2) {
        reads.front().wait();
        reads.erase(reads.begin());
      }
      reads.push_back(swapper_.swap_in({{i, 0}, 0, step_ * chunks_ + i}, pool_.acquire()));
    } else {
      swapper_.swap_out({{i, 0}, 0, step_ * chunks_ + i}, pool_.acquire());
    }
  }
  for (auto& read : reads) read.wait();
  swapper_.flush();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  const double gb = static_cast<double>(bytes()) * 1e-9;
  return {gb / seconds.count(), (cpu_seconds() - cpu_before) / gb};
}

}  // namespace orlop::bench
