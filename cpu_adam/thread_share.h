#pragma once

#include <algorithm>
#include <cstdint>

namespace orlop {

// Parts for each thread: whoever is free takes the next, so that a core which also does something
// else, such as issuing a step, holds the others up for one small part at most.
inline constexpr int64_t kPartsPerThread = 16;

// Calls body(begin, end) for the parts of [0, count) that a team of at most `threads` shares. One
// part needs no team: to form one, and to let another team's threads go for it, takes longer than
// the work on a small tensor.
template <typename Body>
void share_between_threads(int64_t count, int threads, const Body& body) {
  const auto team = static_cast<int>(std::min<int64_t>(threads, count));
  if (team <= 1) {
    if (count > 0) body(int64_t{0}, count);
    return;
  }
  const int64_t parts = std::min<int64_t>(count, team * kPartsPerThread);
#pragma omp parallel for num_threads(team) schedule(dynamic, 1)
  for (int64_t part = 0; part < parts; ++part) {
    body(count / parts * part + std::min(part, count % parts),
         count / parts * (part + 1) + std::min(part + 1, count % parts));
  }
}

}  // namespace orlop
