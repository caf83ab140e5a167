#include "bench/support/rank_waits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/check.h"

namespace orlop::bench {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using Trace = std::vector<TraceSpan>;

auto near(double seconds) { return DoubleNear(seconds, 1e-9); }

// Both ranks gather one block's weights from second 0 on, rank 1's upload waits for its update.
Trace early_rank() {
  return {{"compute", "forward", 0, 2},   {"compute", "wait for comm", 2, 10},
          {"compute", "forward", 10, 12}, {"upload", "wait_gate", 0, 3},
          {"upload", "upload", 3, 4},     {"comm", "wait for upload", 0, 4},
          {"comm", "all_gather", 4, 10}};
}
Trace late_rank() {
  return {{"gpu compute", "forward", 0, 1},      {"gpu compute", "wait for comm", 1, 10},
          {"gpu upload", "wait_gate", 0, 7},     {"gpu upload", "upload", 7, 8.5},
          {"gpu comm", "wait for upload", 0, 9}, {"gpu comm", "all_gather", 9, 10}};
}

TEST(RankWaits, ACollectiveIsCommunicationOnlyOnceTheLastRankHasJoined) {
  const std::vector<RankWaits> waits = rank_waits({early_rank(), late_rank()});
  const RankWaits& early = waits[0];
  EXPECT_THAT(early.compute_seconds, near(4));
  EXPECT_THAT(early.own, ElementsAre(Pair("update", near(1)), Pair("upload", near(1))));
  // From second 4, when it has joined, to 9, when rank 1 has; that waited for its update until 7,
  // copied until 8.5, and its upload queue was idle after that.
  EXPECT_THAT(early.others, ElementsAre(Pair("idle", near(0.5)), Pair("update", near(3)),
                                        Pair("upload", near(1.5))));
  EXPECT_THAT(early.exposed_seconds, near(1));
  EXPECT_THAT(early.own_seconds() + early.others_seconds() + early.exposed_seconds, near(8));
}

TEST(RankWaits, TheLastRankWaitsForItselfAndForTheWire) {
  const RankWaits late = rank_waits({early_rank(), late_rank()})[1];
  EXPECT_THAT(late.others, IsEmpty());
  EXPECT_THAT(late.own, ElementsAre(Pair("idle", near(0.5)), Pair("update", near(6)),
                                    Pair("upload", near(1.5))));
  EXPECT_THAT(late.exposed_seconds, near(1));
}

// The k-th collective of one rank is the k-th of the other, whenever each of them starts it.
TEST(RankWaits, CollectivesAreMatchedByTheirOrder) {
  const Trace first = {{"compute", "wait for comm", 0, 5},
                       {"comm", "all_gather", 0, 2},
                       {"comm", "reduce_scatter", 2, 4},
                       {"comm", "round_grad", 4, 5}};
  const Trace second = {{"comm", "all_gather", 1, 2},
                        {"comm", "wait for compute", 2, 3.5},
                        {"compute", "backward", 2, 3.5},
                        {"comm", "reduce_scatter", 3.5, 4}};
  const RankWaits waits = rank_waits({first, second})[0];
  EXPECT_THAT(waits.others, ElementsAre(Pair("compute", near(1.5)), Pair("idle", near(1))));
  EXPECT_THAT(waits.exposed_seconds, near(1.5));
  EXPECT_THAT(waits.own, ElementsAre(Pair("comm", near(1))));
}

// Rank 0 waits for rank 1, which is in an earlier collective that rank 2 has not joined.
TEST(RankWaits, AChainOfRanksEndsAtTheOneThatIsBusy) {
  const Trace waiting = {{"comm", "all_gather", 0, 1},
                         {"compute", "wait for comm", 1, 6},
                         {"comm", "all_gather", 1, 6}};
  const Trace between = {{"comm", "all_gather", 0, 1},
                         {"comm", "wait for upload", 1, 5},
                         {"upload", "wait for offload", 1, 5},
                         {"offload", "offload", 1, 5},
                         {"comm", "all_gather", 5, 6}};
  const Trace third = {{"comm", "all_gather", 0.5, 1}, {"comm", "all_gather", 2, 6}};
  const RankWaits waits = rank_waits({waiting, between, third})[0];
  EXPECT_THAT(waits.others, ElementsAre(Pair("offload", near(4))));
  EXPECT_THAT(waits.exposed_seconds, near(1));
}

// Clocks of two devices differ a little: queues may seem to wait for each other.
TEST(RankWaits, ACircleOfWaitsEnds) {
  const Trace circle = {{"compute", "wait for comm", 0, 1},
                        {"comm", "wait for upload", 0, 1},
                        {"upload", "wait for comm", 0, 1}};
  EXPECT_THAT(rank_waits({circle})[0].own, ElementsAre(Pair("idle", near(1))));
}

TEST(RankWaits, OneRankJoinsAlone) {
  const RankWaits waits = rank_waits({early_rank()})[0];
  EXPECT_THAT(waits.others, IsEmpty());
  EXPECT_THAT(waits.exposed_seconds, near(6));
}

void expect_refused(const std::vector<Trace>& traces, const std::string& what) {
  try {
    rank_waits(traces);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr(what));
  }
}

TEST(RankWaits, TracesOfDifferentStepsAreRefused) {
  Trace longer = late_rank();
  longer.push_back({"gpu comm", "reduce_scatter", 11, 12});
  expect_refused({early_rank(), longer}, "rank 1 has 2 collectives, that of rank 0 has 1");
  Trace other = late_rank();
  other.back().name = "broadcast";
  expect_refused({early_rank(), other}, "collective 0 is broadcast on rank 1 and all_gather");
}

}  // namespace
}  // namespace orlop::bench
