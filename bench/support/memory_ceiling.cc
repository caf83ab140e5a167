#include "bench/support/memory_ceiling.h"

#include <omp.h>

#include <algorithm>
#include <cstdint>

#include "bench/support/samples.h"

namespace orlop::bench {
namespace {

// Compiled for each set so that the ceiling is the memory's, never the instruction set's.
__attribute__((target_clones("avx512f", "avx2", "default"))) void scale(float* a, int64_t begin,
                                                                        int64_t end, float c) {
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) a[i] *= c;
}

}  // namespace

MemoryCeiling::MemoryCeiling(size_t bytes, int threads)
    : buffer_(bytes, threads), threads_(threads) {}

double MemoryCeiling::bytes_per_s() {
  auto* a = buffer_.as<float>();
  const auto numel = static_cast<int64_t>(buffer_.bytes() / sizeof(float));
  const double seconds = seconds_of([&] {
#pragma omp parallel num_threads(threads_)
    {
      const int64_t count = omp_get_num_threads();
      const int64_t rank = omp_get_thread_num();
      scale(a, numel * rank / count, numel * (rank + 1) / count, 0.999f);
    }
  });
  return 2.0 * static_cast<double>(buffer_.bytes()) / seconds;
}

double measure_memory_bytes_per_s(int threads) {
  MemoryCeiling memory(size_t{2} << 30, threads);
  double best = 0;
  for (int i = 0; i < 5; ++i) best = std::max(best, memory.bytes_per_s());
  return best;
}

}  // namespace orlop::bench
