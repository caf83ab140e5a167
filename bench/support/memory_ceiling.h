#pragma once

#include <cstddef>

#include "bench/support/huge_buffer.h"

namespace orlop::bench {

// The memory ceiling of in-place work: a[i] *= c over a buffer of fp32 far larger than the caches,
// by `threads` threads. Counts one read and one write per byte.
class MemoryCeiling {
 public:
  MemoryCeiling(size_t bytes, int threads);
  // One pass. Run it next to what it is compared with, so that both meet the same neighbours.
  double bytes_per_s();

 private:
  HugeBuffer buffer_;
  int threads_;
};

// The best of five passes over 2 GiB.
double measure_memory_bytes_per_s(int threads);

}  // namespace orlop::bench
