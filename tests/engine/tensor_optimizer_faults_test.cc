// TensorOptimizer with states on drives: the order of transfers, late ones, and what goes wrong.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/statvfs.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "engine/update_order.h"
#include "nvme/io_backend.h"
#include "tests/engine/drive_model.h"
#include "tests/nvme/faulty_backend.h"
#include "tests/nvme/support.h"

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

TEST(StateDrives, ChunksComeInAheadOfTheUpdatesBeforeThem) {
  std::vector<HostUpdate> batch;
  UpdateOrder order(batch, 2);
  const auto update_of = [](int slot, UpdateOp::Kind kind) {
    HostUpdate update;
    update.op.slot = slot;
    update.op.kind = kind;
    return update;
  };
  const auto chunk = [&](int slot) {
    return ChunkUpdate{update_of(slot, UpdateOp::Kind::kSwapIn),
                       update_of(slot, UpdateOp::Kind::kAdam),
                       update_of(slot, UpdateOp::Kind::kSwapOut)};
  };
  order.add(std::vector{chunk(0), chunk(1)});
  order.add(update_of(-1, UpdateOp::Kind::kAdam));
  order.add(std::vector{chunk(2), chunk(3)});
  order.finish();
  std::string text;
  for (const HostUpdate& update : batch) {
    const char* kinds[] = {"adam", "in", "out"};
    text += kinds[static_cast<int>(update.op.kind)] + std::to_string(update.op.slot) + " ";
  }
  EXPECT_EQ(text, "in0 in1 adam0 out0 in2 adam1 out1 in3 adam-1 adam2 out2 adam3 out3 ");
}

TEST(StateDrives, LateTransfersChangeNoBits) {
  const Faults faults([](const IoRequest&, uint64_t nth) {
    return Fault::late(std::chrono::microseconds(nth * 7919 % 700));
  });
  const TempDir dir;
  TensorOptimizer in_memory(1);
  TensorOptimizer on_drives(1, small_slots({dir.path()}));
  Model host(in_memory, DType::kBF16, DType::kBF16, false);
  Model drives(on_drives, DType::kBF16, DType::kBF16, true);
  for (int64_t step = 1; step <= 3; ++step) {
    host.update(step);
    drives.update(step);
  }
  expect_same(host, drives, "late");
}

TEST(StateDrives, AFailedTransferIsOneErrorThatNamesItAndLeavesNoFile) {
  struct Case {
    IoOp op = IoOp::kRead;
    int skip = 0;  // requests that still succeed
    Fault fault;
    const char* text = "";
  };
  for (const Case& c : {Case{IoOp::kRead, 0, Fault::fail(EIO), "Input/output error"},
                        Case{IoOp::kRead, 17, Fault::fail(EIO), "Input/output error"},
                        Case{IoOp::kRead, 2, Fault::flip(5), "checksum"},
                        Case{IoOp::kWrite, 3, Fault::fail(ENOSPC), "No space left"},
                        Case{IoOp::kWrite, 30, Fault::fail(EIO), "Input/output error"}}) {
    std::atomic<bool> broken{false};
    std::atomic<int> seen{0};
    const Faults faults([&](const IoRequest& request, uint64_t) {
      return broken && request.op == c.op && seen++ >= c.skip ? c.fault : Fault::none();
    });
    const TempDir dir;
    {
      TensorOptimizer optimizer(1, small_slots({dir.path()}));
      Model model(optimizer, DType::kBF16, DType::kF32, true);
      model.update(1);
      optimizer.synchronize();
      broken = true;
      const auto go_on = [&] {
        for (int64_t step = 2; step <= 4; ++step) model.update(step);
        optimizer.synchronize();
      };
      const std::string text = error_of(ErrorCode::kIo, go_on);
      EXPECT_THAT(
          text, AllOf(HasSubstr(c.op == IoOp::kRead ? "swap_in" : "swap_out"), HasSubstr(" of 'w"),
                      HasSubstr("orlop-r"), HasSubstr("offset"), HasSubstr(c.text)));
      EXPECT_EQ(error_of(ErrorCode::kIo, [&] { model.update(5); }), text);
    }
    EXPECT_TRUE(fs::is_empty(dir.path()));
  }
}

TEST(StateDrives, AFullDriveIsRefusedAndWhatFitsStillWorks) {
  const TempDir dir;
  StateDrives drives = small_slots({dir.path()});
  drives.slot_bytes = size_t{1} << 20;
  drives.host_bytes = 4 * drives.slot_bytes;
  TensorOptimizer optimizer(1, drives);
  struct statvfs space {};
  ASSERT_EQ(::statvfs(dir.path().c_str(), &space), 0);
  const auto free_bytes = static_cast<int64_t>(space.f_bavail * space.f_frsize);
  alignas(4) std::byte never_read[4];
  TensorSpec spec;
  spec.name = "too large";
  spec.numel = free_bytes / 8 + (int64_t{1} << 30);
  spec.weights = never_read;
  spec.on_drives = true;
  const std::string text =
      error_of(ErrorCode::kDoesNotFit, [&] { optimizer.add(std::vector{spec}); });
  EXPECT_THAT(text, AllOf(HasSubstr(dir.path()), HasSubstr("bytes are missing")));
  TensorOptimizer in_memory(1);
  Model host(in_memory, DType::kF32, DType::kF32, false);
  Model model(optimizer, DType::kF32, DType::kF32, true);
  for (int64_t step = 1; step <= 2; ++step) {
    host.update(step);
    model.update(step);
  }
  expect_same(host, model, "after a refusal");
}

TEST(StateDrives, WhatCannotWorkIsRefusedByName) {
  const TempDir dir;
  std::ofstream(dir / "file") << "no directory";
  EXPECT_THAT(error_of(ErrorCode::kUsage, [&] { TensorOptimizer(1, small_slots({dir / "file"})); }),
              HasSubstr(dir / "file"));
  StateDrives few = small_slots({dir.path()});
  few.host_bytes = 2 * few.slot_bytes;
  EXPECT_THAT(error_of(ErrorCode::kUsage, [&] { TensorOptimizer(1, few); }),
              HasSubstr("3 are needed"));
  few.slot_bytes = 1000;
  EXPECT_THAT(error_of(ErrorCode::kUsage, [&] { TensorOptimizer(1, few); }), HasSubstr("1000"));
  TensorOptimizer without(1);
  EXPECT_THAT(error_of(ErrorCode::kUsage, [&] { Model(without, DType::kF32, DType::kF32, true); }),
              HasSubstr("no directory"));
  TensorOptimizer optimizer(1, small_slots({dir.path()}));
  Model model(optimizer, DType::kF32, DType::kF32, true);
  std::byte byte[4];
  EXPECT_THAT(error_of(ErrorCode::kUsage,
                       [&] { optimizer.read_state(5, StatePlane::kMasterRest, 0, byte); }),
              HasSubstr("fp32"));
  EXPECT_THAT(error_of(ErrorCode::kUsage,
                       [&] { optimizer.write_state(5, StatePlane::kExpAvg, 1665, byte); }),
              HasSubstr("1665"));
  const Bytes values = random_values(kSizes[5], DType::kF32, 1);
  const GradientView gradient{values.data(), DType::kF32, kSizes[5]};
  const TensorUpdate update{model.index(5), gradient, {}, {}};
  EXPECT_THAT(error_of(ErrorCode::kUsage,
                       [&] {
                         optimizer.update(std::vector{update, update}, 1.0f, 1);
                       }),
              HasSubstr("twice"));
}

// A file that something else shortened is no state any more.
TEST(StateDrives, AFileThatAnotherShortenedIsAnError) {
  const TempDir dir;
  TensorOptimizer optimizer(1, small_slots({dir.path()}));
  Model model(optimizer, DType::kBF16, DType::kF32, true);
  model.update(1);
  optimizer.synchronize();
  for (const auto& entry : fs::directory_iterator(dir.path())) fs::resize_file(entry.path(), 8192);
  const std::string text = error_of(ErrorCode::kIo, [&] {
    model.update(2);
    optimizer.synchronize();
  });
  EXPECT_THAT(text, HasSubstr("8192"));
}

}  // namespace
}  // namespace orlop::test
