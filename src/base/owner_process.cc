#include "base/owner_process.h"

#include <pthread.h>

#include <atomic>

namespace orlop {
namespace {

std::atomic<uint64_t> generation{0};

const int kCounts = pthread_atfork(nullptr, nullptr, [] { ++generation; });

}  // namespace

uint64_t fork_generation() {
  ORLOP_INVARIANT(kCounts == 0);
  return generation.load(std::memory_order_relaxed);
}

}  // namespace orlop
