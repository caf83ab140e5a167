// TensorOptimizer with states on drives: the bits of states in host memory.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/engine/drive_model.h"
#include "tests/nvme/support.h"
#include "tests/support/sanitized.h"

namespace orlop::test {
namespace {

namespace fs = std::filesystem;
using nvme::TempDir;
using ::testing::HasSubstr;

size_t bytes_for(const TensorOptimizer& optimizer, const std::string& purpose) {
  for (const TensorMemory& held : optimizer.memory_report()) {
    if (held.purpose == purpose) return held.bytes;
  }
  return 0;
}

struct Layout {
  DType dtype, moments;
};

class StatesOnDrives : public ::testing::TestWithParam<Layout> {
 protected:
  std::string swap_files(const TempDir& dir) const {
    std::string names;
    for (const auto& entry : fs::directory_iterator(dir.path())) names += entry.path().string();
    return names;
  }
};

INSTANTIATE_TEST_SUITE_P(
    Layouts, StatesOnDrives,
    ::testing::Values(Layout{DType::kF32, DType::kF32}, Layout{DType::kF32, DType::kBF16},
                      Layout{DType::kBF16, DType::kF32}, Layout{DType::kBF16, DType::kBF16},
                      Layout{DType::kF16, DType::kF32}, Layout{DType::kF16, DType::kBF16}));

// Case S-21: weights of a part of a slot and of many, after each of 50 steps.
TEST_P(StatesOnDrives, StepsHaveTheBitsOfStatesInHostMemory) {
  const auto [dtype, moments] = GetParam();
  for (const std::string engine : {"auto", "threads"}) {
    const int64_t steps = engine == "auto" && !kSanitized ? 50 : 4;
    const TempDir one, two;
    TensorOptimizer in_memory(2);
    TensorOptimizer on_drives(2, small_slots({one.path(), two.path()}, engine));
    Model host(in_memory, dtype, moments, false);
    Model drives(on_drives, dtype, moments, true);
    for (int64_t step = 1; step <= steps; ++step) {
      host.update(step);
      drives.update(step);
      expect_same(host, drives, engine + ", step " + std::to_string(step));
    }
  }
}

// Case S-19: with the three slots that are the least, of which the largest weight fills 25.
TEST_P(StatesOnDrives, AnOptimizersOwnCopyOfTheWeightsToo) {
  const auto [dtype, moments] = GetParam();
  const TempDir dir;
  TensorOptimizer in_memory(2);
  StateDrives two_slots = small_slots({dir.path()});
  two_slots.host_bytes = 3 * two_slots.slot_bytes;
  TensorOptimizer on_drives(2, two_slots);
  Model host(in_memory, dtype, moments, false, true);
  Model drives(on_drives, dtype, moments, true, true);
  expect_same(host, drives, "at the start");
  for (int64_t step = 1; step <= 3; ++step) {
    host.update(step, step == 1);
    drives.update(step, step == 1);
  }
  expect_same(host, drives, "after three steps");
}

// What others do with weights and states between updates.
TEST_P(StatesOnDrives, ReadsAndWritesBetweenUpdatesHaveTheSameBits) {
  const auto [dtype, moments] = GetParam();
  const TempDir dir;
  TensorOptimizer in_memory(2);
  TensorOptimizer on_drives(2, small_slots({dir.path()}));
  Model host(in_memory, dtype, moments, false);
  Model drives(on_drives, dtype, moments, true);
  const size_t last = std::size(kSizes) - 1;
  const auto count = static_cast<size_t>(kSizes[last]);
  for (int64_t step = 1; step <= 4; ++step) {
    for (Model* model : {&host, &drives}) {
      model->update(step);
      TensorOptimizer& optimizer = model->optimizer;
      const int64_t index = model->index(last);
      if (step == 1) {  // a few weights are others, elsewhere
        optimizer.wait(index);
        Bytes changed = model->copy(last);
        for (size_t i = 0; i < changed.size(); i += 5000) changed[i] ^= std::byte{1};
        changed.swap(model->weights[last]);
        optimizer.move_weights(index, model->weights[last].data());
        optimizer.adopt_weights(index, changed.data());
      } else if (step == 2) {
        std::vector<float> master(count);
        for (size_t i = 0; i < count; ++i) master[i] = static_cast<float>(i) * 1.00001f;
        optimizer.write_master(index, master);
      } else if (step == 3) {  // in pieces that no chunk begins with
        const Bytes values = random_values(20000, moments, 7);
        optimizer.write_state(index, StatePlane::kExpAvg, 1001, values);
        Bytes found(values.size() / 2);
        optimizer.read_state(index, StatePlane::kExpAvg, 1001, found);
        EXPECT_TRUE(std::equal(found.begin(), found.end(), values.begin()));
      }
    }
    expect_same(host, drives, "step " + std::to_string(step));
  }
}

TEST_P(StatesOnDrives, MorePartsComeWhileOthersAreUpdated) {
  const auto [dtype, moments] = GetParam();
  const TempDir dir;
  TensorOptimizer in_memory(1);
  TensorOptimizer on_drives(1, small_slots({dir.path()}));
  Model host(in_memory, dtype, moments, false), more_host(in_memory, dtype, moments, false);
  Model drives(on_drives, dtype, moments, true);
  host.update(1);
  drives.update(1);
  Model more_drives(on_drives, dtype, moments, true);
  Model beside(on_drives, dtype, moments, false);
  for (int64_t step = 2; step <= 3; ++step) {
    for (Model* model : {&host, &more_host, &drives, &more_drives, &beside}) model->update(step);
  }
  expect_same(host, drives, "first");
  expect_same(more_host, more_drives, "second");
  expect_same(more_host, beside, "in memory beside them");
}

// Case R-16, of the doors.
TEST_P(StatesOnDrives, MemoryHoldsWeightsAndSlotsAlone) {
  const auto [dtype, moments] = GetParam();
  const TempDir dir;
  {
    TensorOptimizer in_memory(1);
    const StateDrives drives = small_slots({dir.path()});
    TensorOptimizer on_drives(1, drives);
    const Model host(in_memory, dtype, moments, false);
    const Model other(on_drives, dtype, moments, true);
    EXPECT_GT(bytes_for(in_memory, "moments"), 0u);
    EXPECT_EQ(bytes_for(on_drives, "moments") + bytes_for(on_drives, "masters"), 0u);
    EXPECT_EQ(bytes_for(on_drives, "slots of drives"), drives.host_bytes);
    for (size_t i = 0; i < std::size(kSizes); ++i) {
      const TensorStates states = on_drives.states(other.index(i));
      EXPECT_EQ(states.exp_avg, nullptr);
      EXPECT_EQ(states.exp_avg_sq, nullptr);
      EXPECT_EQ(states.lo, nullptr);
      EXPECT_EQ(states.master, nullptr);
    }
    EXPECT_THAT(swap_files(dir), HasSubstr(".swap"));
  }
  EXPECT_EQ(swap_files(dir), "");
}

}  // namespace
}  // namespace orlop::test
