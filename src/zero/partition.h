#pragma once

#include <algorithm>
#include <cstdint>

#include "base/bytes.h"

namespace orlop {

// A rank's contiguous part of a FlatParam. Every rank's part has the same padded length, so that
// collectives have equal counts; a part may be shorter than that, or empty, at the end.
struct ShardRange {
  int64_t begin = 0;         // first element
  int64_t numel = 0;         // elements that exist
  int64_t padded_numel = 0;  // the same on all ranks
};

struct ElementRange {
  int64_t begin = 0;
  int64_t numel = 0;
};

// What two ranges have in common.
inline ElementRange intersect(const ElementRange& a, const ElementRange& b) {
  const int64_t begin = std::max(a.begin, b.begin);
  const int64_t end = std::min(a.begin + a.numel, b.begin + b.numel);
  return {begin, std::max<int64_t>(0, end - begin)};
}

// Parts are multiples of `granule` elements, so that no part starts in the middle of an aligned
// group.
inline ShardRange shard_range(int64_t numel, int rank, int world_size, int64_t granule = 128) {
  const int64_t padded = ceil_div(ceil_div(numel, world_size), granule) * granule;
  const int64_t begin = std::min(numel, padded * rank);
  return {begin, std::min(numel, begin + padded) - begin, padded};
}

}  // namespace orlop
