#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "orlop/engine.h"
#include "tests/support/sanitized.h"

namespace orlop::test {

// Masters and moments of every tensor: "<tensor>.master", "<tensor>.exp_avg",
// "<tensor>.exp_avg_sq".
using States = std::map<std::string, std::vector<float>>;

States read_states(Engine& engine);

// What a run leaves behind that placement must not change.
struct RunRecord {
  std::vector<double> losses;
  std::vector<double> norms;
  std::vector<bool> skipped;
  States states;
};

// The micro-batches of step `step` (from 1): a pure function of the arguments, so that a resumed
// run sees what the straight one saw.
std::vector<MicroBatch> batches_of_step(const EngineConfig& config, int64_t vocab, int64_t step);

// A sanitizer sees no more in the later steps.
inline constexpr int64_t kRunSteps = kSanitized ? 8 : 20;

struct RunOptions {
  int64_t vocab = 61;
  int64_t from = 1;
  int64_t until = kRunSteps;
  int64_t last = kRunSteps;       // of the whole run: has one micro-batch less
  bool evaluate_between = false;  // before every step
};

// Tries the steps from .. until with batches_of_step and reads the states at the end.
RunRecord run(Engine& engine, const RunOptions& options);

// Bit by bit; tells the first difference with both values.
::testing::AssertionResult same_states(const States& expected, const States& found);
::testing::AssertionResult same_bits(const RunRecord& expected, const RunRecord& found);

// Where engines of tests run: ORLOP_TEST_DEVICE (host, cuda, cuda:N), "host" without it. A program
// that is to run them on a GPU skips all of its tests where there is none.
std::string test_device();

// A configuration for tiny models on test_device(): 2 x 16 tokens, 3 micro-batches, a learning rate
// at which every step shows.
EngineConfig tiny_engine_config(Precision precision);

}  // namespace orlop::test
