#include "comm/rendezvous.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "orlop/error.h"

namespace orlop {
namespace {

using Variables = std::map<std::string, std::string>;

RankIds ids_of(const Variables& variables) {
  return read_rank_ids([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  });
}

std::string error_of(const Variables& variables) {
  try {
    ids_of(variables);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    return error.what();
  }
  return "no error";
}

TEST(RendezvousTest, OneRankWithoutALauncher) { EXPECT_EQ(ids_of({}), RankIds{}); }

TEST(RendezvousTest, ReadsEveryLauncher) {
  EXPECT_EQ(ids_of({{"RANK", "5"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}}),
            (RankIds{Launcher::kTorchrun, 5, 8, 1}));
  EXPECT_EQ(ids_of({{"OMPI_COMM_WORLD_RANK", "2"},
                    {"OMPI_COMM_WORLD_SIZE", "3"},
                    {"OMPI_COMM_WORLD_LOCAL_RANK", "2"}}),
            (RankIds{Launcher::kMpirun, 2, 3, 2}));
  EXPECT_EQ(ids_of({{"SLURM_PROCID", "3"}, {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_LOCALID", "1"}}),
            (RankIds{Launcher::kSrun, 3, 4, 1}));
}

TEST(RendezvousTest, ABatchScriptOfSlurmIsOneRank) {
  EXPECT_EQ(ids_of({{"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}, {"SLURM_NTASKS", "4"}}),
            RankIds{});
}

TEST(RendezvousTest, LaunchersThatAgreeAreOne) {
  Variables both{{"RANK", "1"},
                 {"WORLD_SIZE", "2"},
                 {"LOCAL_RANK", "1"},
                 {"OMPI_COMM_WORLD_RANK", "1"},
                 {"OMPI_COMM_WORLD_SIZE", "2"},
                 {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}};
  EXPECT_EQ(ids_of(both), (RankIds{Launcher::kMpirun, 1, 2, 1}));
  both["WORLD_SIZE"] = "4";
  EXPECT_THAT(error_of(both), testing::AllOf(testing::HasSubstr("rank 1 of 4 by torchrun"),
                                             testing::HasSubstr("rank 1 of 2 by mpirun")));
}

TEST(RendezvousTest, WhatIsMissingIsNamed) {
  EXPECT_THAT(error_of({{"RANK", "0"}, {"LOCAL_RANK", "0"}}),
              testing::HasSubstr("WORLD_SIZE is not set"));
  EXPECT_THAT(error_of({{"WORLD_SIZE", "2"}}),
              testing::HasSubstr("RANK and LOCAL_RANK is not set"));
  EXPECT_THAT(error_of({{"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_PROCID", "0"}}),
              testing::HasSubstr("SLURM_LOCALID"));
}

TEST(RendezvousTest, RefusesWhatContradictsItself) {
  EXPECT_THAT(error_of({{"RANK", "2"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}}),
              testing::HasSubstr("RANK=2, WORLD_SIZE=2"));
  EXPECT_THAT(error_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "1"}}),
              testing::HasSubstr("LOCAL_RANK=1"));
  EXPECT_THAT(error_of({{"RANK", "0"}, {"WORLD_SIZE", "0"}, {"LOCAL_RANK", "0"}}),
              testing::HasSubstr("WORLD_SIZE=0"));
  for (const char* text : {"", "x", "-1", "1.5", "2 "}) {
    EXPECT_THAT(error_of({{"RANK", "0"}, {"WORLD_SIZE", text}, {"LOCAL_RANK", "0"}}),
                testing::HasSubstr("WORLD_SIZE='" + std::string(text) + "'"));
  }
}

TEST(RendezvousTest, BelowTheAgentOfTorchrunItsRanksCount) {
  // srun starts one agent per machine, whose processes inherit what srun has told it.
  Variables both{{"RANK", "5"},         {"WORLD_SIZE", "8"},    {"LOCAL_RANK", "1"},
                 {"SLURM_PROCID", "1"}, {"SLURM_LOCALID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}};
  EXPECT_THAT(error_of(both), testing::HasSubstr("rank 1 of 2 by srun"));
  both["TORCHELASTIC_RUN_ID"] = "none";
  EXPECT_EQ(ids_of(both), (RankIds{Launcher::kTorchrun, 5, 8, 1}));
}

TEST(RendezvousTest, RanksNeedAPlaceToMeet) {
  try {
    join_ranks_of({Launcher::kTorchrun, 1, 2, 1}, [](const std::string&) { return std::nullopt; },
                  {});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_THAT(error.what(), testing::HasSubstr("rank 1 of 2, but ORLOP_RENDEZVOUS does not say"));
  }
}

TEST(RendezvousTest, RefusesAPlaceThatIsNone) {
  for (const char* place : {"", "here", "here:", ":12", "::1:12", "127.0.0.1:x", "[]:1"}) {
    try {
      join_ranks_of({Launcher::kTorchrun, 1, 2, 1},
                    [&](const std::string& name) -> std::optional<std::string> {
                      if (name != "ORLOP_RENDEZVOUS") return std::nullopt;
                      return place;
                    },
                    {});
      FAIL() << place;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUsage) << error.what();
      EXPECT_THAT(error.what(), testing::HasSubstr("host:port")) << place;
    }
  }
}

}  // namespace
}  // namespace orlop
