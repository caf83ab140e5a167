// WeightDrives, and TensorOptimizer with weights on drives beside the states: the bits of weights
// in host memory, fetches beside updates, and what goes wrong.

#include "orlop/weight_drives.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "nvme/io_backend.h"
#include "tests/engine/drive_model.h"
#include "tests/nvme/faulty_backend.h"
#include "tests/nvme/support.h"
#include "tests/support/sanitized.h"

namespace orlop::test {
namespace {

namespace fs = std::filesystem;
using nvme::Fault;
using nvme::Faults;
using nvme::IoOp;
using nvme::IoRequest;
using nvme::TempDir;
using ::testing::AllOf;
using ::testing::HasSubstr;

// Chunks of one page of weights, with states in a slot of eight.
StateDrives slots_of_eight(const TempDir& dir, const std::string& engine = "auto") {
  StateDrives drives = small_slots({dir.path()}, engine);
  drives.slot_bytes = size_t{8} * 4096;
  drives.host_bytes = 4 * drives.slot_bytes;
  return drives;
}

struct Layout {
  DType dtype, moments;
};

class WeightsOnDrives : public ::testing::TestWithParam<Layout> {};

INSTANTIATE_TEST_SUITE_P(
    Layouts, WeightsOnDrives,
    ::testing::Values(Layout{DType::kF32, DType::kF32}, Layout{DType::kF32, DType::kBF16},
                      Layout{DType::kBF16, DType::kF32}, Layout{DType::kBF16, DType::kBF16},
                      Layout{DType::kF16, DType::kF32}, Layout{DType::kF16, DType::kBF16}));

TEST_P(WeightsOnDrives, StepsHaveTheBitsOfWeightsInHostMemory) {
  const auto [dtype, moments] = GetParam();
  for (const std::string engine : {"auto", "threads"}) {
    const int64_t steps = engine == "auto" && !kSanitized ? 20 : 3;
    const TempDir dir;
    const StateDrives at = slots_of_eight(dir, engine);
    TensorOptimizer in_memory(2), on_drives(2, at);
    Model host(in_memory, dtype, moments, false, true);
    Model drives(on_drives, dtype, moments, true, false, std::make_shared<WeightDrives>(at));
    expect_same(host, drives, "at the start");
    for (int64_t step = 1; step <= steps; ++step) {
      host.update(step, step % 2 == 0);
      drives.update(step, step % 2 == 0);
      expect_same(host, drives, engine + ", step " + std::to_string(step));
    }
  }
}

TEST_P(WeightsOnDrives, ReadsAndWritesBetweenUpdatesHaveTheSameBits) {
  const auto [dtype, moments] = GetParam();
  const TempDir dir;
  TensorOptimizer in_memory(2), on_drives(2, slots_of_eight(dir));
  Model host(in_memory, dtype, moments, false, true);
  Model drives(on_drives, dtype, moments, true, false,
               std::make_shared<WeightDrives>(slots_of_eight(dir)));
  const size_t last = std::size(kSizes) - 1;
  const auto count = static_cast<size_t>(kSizes[last]);
  for (int64_t step = 1; step <= 4; ++step) {
    for (Model* model : {&host, &drives}) {
      const int64_t index = model->index(last);
      Bytes changed = model->copy(last);  // before the first update: while chunks are blank
      for (size_t i = 0; i < changed.size(); i += 5000) changed[i] ^= std::byte{1};
      model->optimizer.adopt_weights(index, changed.data());
      model->update(step);
      if (step == 2) {
        std::vector<float> master(count);
        for (size_t i = 0; i < count; ++i) master[i] = static_cast<float>(i) * 1.00001f;
        model->optimizer.write_master(index, master);
      } else if (step == 3) {  // in pieces that no chunk begins with
        const Bytes values = random_values(20000, moments, 7);
        model->optimizer.write_state(index, StatePlane::kExpAvg, 1001, values);
      }
    }
    expect_same(host, drives, "step " + std::to_string(step));
  }
}

// Every fetch finds what the update before it wrote, though nobody waits for either, in slots that
// are used again at once.
TEST_P(WeightsOnDrives, FetchesWaitForTheUpdatesBeforeThem) {
  const auto [dtype, moments] = GetParam();
  const Faults faults([](const IoRequest&, uint64_t nth) {
    return Fault::late(std::chrono::microseconds(nth * 7919 % 300));
  });
  const TempDir dir;
  TensorOptimizer in_memory(1), on_drives(1, slots_of_eight(dir));
  const auto weights = std::make_shared<WeightDrives>(slots_of_eight(dir));
  Model host(in_memory, dtype, moments, false);
  Model drives(on_drives, dtype, moments, true, false, weights);
  std::vector<int64_t> all;
  std::vector<size_t> sizes;
  for (size_t i = 0; i < std::size(kSizes); ++i) {
    if (drives.on_weight_drives[i] < 0) continue;
    all.push_back(drives.on_weight_drives[i]);
    sizes.push_back(drives.weights[i].size());
  }
  weights->take_slots(2, WeightDrives::slot_bytes(sizes));
  for (int64_t step = 1; step <= 3; ++step) {
    host.update(step);
    drives.update(step);
    in_memory.synchronize();
    for (const size_t slot : {0u, 1u, 1u}) {
      const uint32_t ticket = weights->fetch(all, slot, {});
      if (slot == 0) continue;
      weights->wait(ticket);
      const std::byte* found = weights->slot(slot);
      for (size_t i = 0; i < std::size(kSizes); ++i) {
        if (drives.on_weight_drives[i] < 0) continue;
        const Bytes expected = host.copy(i);
        ASSERT_TRUE(std::equal(expected.begin(), expected.end(), found))
            << kSizes[i] << " elements, step " << step;
        found += WeightDrives::slot_bytes(std::vector{expected.size()});
      }
    }
  }
  expect_same(host, drives, "at the end");
}

TEST(WeightDrives, AFetchWaitsUntilItsSlotIsFree) {
  const TempDir dir;
  WeightDrives weights(slots_of_eight(dir));
  const Bytes values = random_values(5000, DType::kF32, 3);
  const DriveWeight place{"w", values.size()};
  const int64_t index = weights.add({&place, 1});
  weights.write(index, values);
  weights.take_slots(1, values.size());
  std::atomic<bool> free{false};
  const Fence fence{[](void* flag) {
                      static_cast<std::atomic<bool>*>(flag)->wait(false);
                      return 0;
                    },
                    &free};
  const uint32_t ticket = weights.fetch({&index, 1}, 0, fence);
  EXPECT_EQ(weights.slot(0)[0], std::byte{0});
  EXPECT_LT(*weights.fetched(), ticket);
  free = true;
  free.notify_all();
  weights.wait(ticket);
  EXPECT_TRUE(std::equal(values.begin(), values.end(), weights.slot(0)));
  const Fence broken{[](void*) { return 7; }, nullptr};
  const uint32_t never = weights.fetch({&index, 1}, 0, broken);
  EXPECT_THAT(error_of(ErrorCode::kDevice, [&] { weights.wait(never); }),
              AllOf(HasSubstr("'w'"), HasSubstr("status 7")));
}

TEST(WeightDrives, AFailedTransferIsOneErrorThatNamesItAndLeavesNoFile) {
  for (const IoOp op : {IoOp::kRead, IoOp::kWrite}) {
    std::atomic<bool> broken{false};
    const Faults faults([&](const IoRequest& request, uint64_t) {
      return broken && request.op == op ? Fault::fail(EIO) : Fault::none();
    });
    const TempDir dir;
    {
      TensorOptimizer optimizer(1, slots_of_eight(dir));
      const auto weights = std::make_shared<WeightDrives>(slots_of_eight(dir));
      Model model(optimizer, DType::kBF16, DType::kF32, true, false, weights);
      const int64_t index = model.on_weight_drives.back();
      weights->take_slots(2, model.weights.back().size());
      model.update(1);
      optimizer.synchronize();
      broken = true;
      if (op == IoOp::kWrite) {
        model.update(2);
        EXPECT_THAT(error_of(ErrorCode::kIo, [&] { optimizer.synchronize(); }),
                    AllOf(HasSubstr("swap_out"), HasSubstr(" of 'w"), HasSubstr("Input/output")));
      } else {
        const auto fetch = [&] { weights->wait(weights->fetch({&index, 1}, 0, {})); };
        const std::string text = error_of(ErrorCode::kIo, fetch);
        EXPECT_THAT(text, AllOf(HasSubstr("swap_in"), HasSubstr(" of 'w40001'"),
                                HasSubstr("orlop-r"), HasSubstr("Input/output error")));
        EXPECT_EQ(error_of(ErrorCode::kIo, fetch), text);
        EXPECT_EQ(error_of(ErrorCode::kIo, [&] { weights->synchronize(); }), text);
      }
    }
    EXPECT_TRUE(fs::is_empty(dir.path()));
  }
}

TEST(WeightDrives, AFullDriveIsRefusedAndWhatFitsStillWorks) {
  const TempDir dir;
  StateDrives drives = slots_of_eight(dir);
  drives.slot_bytes = size_t{64} << 20;
  WeightDrives weights(drives);
  struct statvfs space {};
  ASSERT_EQ(::statvfs(dir.path().c_str(), &space), 0);
  const size_t all = static_cast<size_t>(space.f_blocks) * space.f_frsize;
  const DriveWeight places[] = {{"huge", 2 * all}, {"w", 5000}};
  error_of(ErrorCode::kDoesNotFit, [&] { weights.add({places, 1}); });
  const int64_t index = weights.add({places + 1, 1});
  const Bytes values = random_values(1250, DType::kF32, 3);
  weights.write(index, values);
  Bytes found(values.size());
  weights.read(index, found);
  EXPECT_TRUE(found == values);
}

TEST(WeightDrives, WhatCannotWorkIsRefused) {
  const TempDir dir;
  StateDrives small = slots_of_eight(dir);
  small.slot_bytes = size_t{6} * 4096;
  EXPECT_THAT(error_of(ErrorCode::kUsage, [&] { WeightDrives refused(small); }),
              HasSubstr("give at least 28672"));
  WeightDrives weights(slots_of_eight(dir));
  const Bytes values(5000);
  const DriveWeight places[] = {{"w", values.size()}, {"empty", 0}};
  EXPECT_THAT(error_of(ErrorCode::kUsage, [&] { weights.add(places); }), HasSubstr("'empty'"));
  const int64_t index = weights.add({places, 1});
  EXPECT_EQ(index, 0);
  weights.write(index, values);
  EXPECT_THAT(error_of(ErrorCode::kUsage, [&] { weights.write(index, Bytes(3)); }),
              AllOf(HasSubstr("'w' has 5000 bytes"), HasSubstr("3 given")));
  EXPECT_THAT(error_of(ErrorCode::kUsage,
                       [&] {
                         weights.fetch({&index, 1}, 0, {});
                       }),
              HasSubstr("slot 0"));
  weights.take_slots(1, 4096);
  EXPECT_THAT(error_of(ErrorCode::kUsage,
                       [&] {
                         weights.fetch({&index, 1}, 0, {});
                       }),
              HasSubstr("8192 bytes are to come"));
  TensorOptimizer optimizer(1, slots_of_eight(dir));
  TensorSpec spec;
  spec.name = "w";
  spec.numel = 1249;
  spec.on_drives = true;
  spec.weight_drives = std::make_shared<WeightDrives>(slots_of_eight(dir));
  spec.drive_weight = spec.weight_drives->add({places, 1});
  EXPECT_THAT(error_of(ErrorCode::kUsage,
                       [&] {
                         optimizer.add({&spec, 1});
                       }),
              HasSubstr("1249 elements of 4 bytes, on drives it has 5000 bytes"));
  spec.numel = 1250;
  spec.on_drives = false;
  EXPECT_THAT(error_of(ErrorCode::kUsage,
                       [&] {
                         optimizer.add({&spec, 1});
                       }),
              HasSubstr("weights on drives need states on drives"));
  spec.on_drives = true;
  EXPECT_NO_THROW(optimizer.add({&spec, 1}));
}

}  // namespace
}  // namespace orlop::test
