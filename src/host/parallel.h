#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace orlop::host {

// body(i) for i in [0, count) on `threads` threads, in contiguous parts. The body must not throw,
// and what it computes for one i must not depend on the others.
template <typename Body>
void parallel_for(int threads, int64_t count, const Body& body) {
  const int used = static_cast<int>(std::min<int64_t>(threads, count));
  if (used <= 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
#pragma omp parallel for num_threads(used) schedule(static)
  for (int64_t i = 0; i < count; ++i) body(i);
}

// The same for items of unequal cost: whoever is free takes the next. body(i, thread), 0 <= thread
// < threads.
template <typename Body>
void parallel_items(int threads, int64_t count, const Body& body) {
  const int used = static_cast<int>(std::min<int64_t>(threads, count));
  if (used <= 1) {
    for (int64_t i = 0; i < count; ++i) body(i, 0);
    return;
  }
#pragma omp parallel for num_threads(used) schedule(dynamic, 1)
  for (int64_t i = 0; i < count; ++i) body(i, omp_get_thread_num());
}

// body(begin, end) over contiguous pieces of [0, count) of at least `grain` elements.
template <typename Body>
void parallel_pieces(int threads, int64_t count, int64_t grain, const Body& body) {
  const int64_t pieces = std::min<int64_t>(threads, (count + grain - 1) / grain);
  parallel_for(threads, pieces,
               [&](int64_t piece) { body(count * piece / pieces, count * (piece + 1) / pieces); });
}

}  // namespace orlop::host
