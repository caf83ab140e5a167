#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace orlop {

// Calls body(begin, end) for the parts of [0, count) that a team of at most `threads` shares, each
// part on a thread of its own. One part needs no team: to form one, and to let another team's
// threads go for it, takes longer than the work on a small tensor.
template <typename Body>
void share_between_threads(int64_t count, int threads, const Body& body) {
  const auto team = static_cast<int>(std::min<int64_t>(threads, count));
  if (team <= 1) {
    if (count > 0) body(int64_t{0}, count);
    return;
  }
#pragma omp parallel num_threads(team)
  {
    // OpenMP may give fewer threads than asked for: the split follows what there is.
    const int64_t given = omp_get_num_threads();
    const int64_t rank = omp_get_thread_num();
    const int64_t begin = count / given * rank + std::min(rank, count % given);
    const int64_t end = begin + count / given + (rank < count % given ? 1 : 0);
    if (begin < end) body(begin, end);
  }
}

}  // namespace orlop
