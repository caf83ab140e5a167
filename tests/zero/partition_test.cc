#include "zero/partition.h"

#include <gtest/gtest.h>

namespace orlop {
namespace {

TEST(Partition, PartsCoverTheParameterOnce) {
  for (const int64_t numel :
       {int64_t{0}, int64_t{1}, int64_t{127}, int64_t{128}, int64_t{1000003}}) {
    for (int world = 1; world <= 8; ++world) {
      int64_t next = 0;
      for (int rank = 0; rank < world; ++rank) {
        const ShardRange range = shard_range(numel, rank, world);
        EXPECT_EQ(range.begin, next);
        EXPECT_GE(range.numel, 0);
        EXPECT_LE(range.numel, range.padded_numel);
        EXPECT_EQ(range.padded_numel, shard_range(numel, 0, world).padded_numel);
        next = range.begin + range.numel;
      }
      EXPECT_EQ(next, numel) << "world " << world;
    }
  }
}

// Case D-03.
TEST(Partition, FewerElementsThanRanksLeavesEmptyParts) {
  for (const int64_t numel : {1, 3, 7}) {
    for (const int world_size : {2, 4, 8}) {
      EXPECT_EQ(shard_range(numel, 0, world_size).numel, numel);
      EXPECT_EQ(shard_range(numel, world_size - 1, world_size).numel, 0);
    }
  }
}

}  // namespace
}  // namespace orlop
