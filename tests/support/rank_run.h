#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "orlop/engine.h"
#include "tests/support/engine_run.h"

namespace orlop::test {

// Twelve micro-batches of one row a step: 12, 6, 4 or 3 per rank.
EngineConfig rank_config(Precision precision);

// Opens an engine on each of `world_size` threads, the ranks of one run, and calls `body` there.
// The first error of a rank is thrown here.
void run_engines(int world_size, const std::string& model, const EngineConfig& config,
                 const std::function<void(Engine&)>& body);

// What rank `rank` of `world_size` does of a step's micro-batches: every world_size-th.
std::vector<MicroBatch> share_of(const std::vector<MicroBatch>& batches, int rank, int world_size);

// The steps of run() with the step's micro-batches shared by the ranks of `engine`;
// config.batch.accumulation_steps is that of all ranks together.
RunRecord run_share(Engine& engine, int64_t all_micro_batches, const RunOptions& options);

// A run on threads; every rank must see the same losses, norms and states, which are returned.
RunRecord run_on_ranks(int world_size, const std::string& model, EngineConfig config,
                       const RunOptions& options);

// How far losses and norms may lie apart between numbers of ranks: relative, in fp32 at a learning
// rate of 1e-4.
inline constexpr double kLossBound = 1e-5;
::testing::AssertionResult close_losses(const RunRecord& expected, const RunRecord& found);

// The states of such runs: every plane of every tensor by the relative error of its Frobenius norm.
// Masters move by a thousandth of themselves, so that a part which was not updated shows.
inline constexpr double kMasterBound = 1e-5;
inline constexpr double kMomentBound = 1e-3;
::testing::AssertionResult close_states(const States& expected, const States& found);

}  // namespace orlop::test
