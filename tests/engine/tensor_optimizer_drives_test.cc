// TensorOptimizer with states on drives: the bits of states in host memory, and what goes wrong.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "base/half.h"
#include "engine/update_order.h"
#include "nvme/io_backend.h"
#include "orlop/error.h"
#include "orlop/tensor_optimizer.h"
#include "tests/nvme/faulty_backend.h"
#include "tests/nvme/support.h"

namespace orlop::test {
namespace {

namespace fs = std::filesystem;
using nvme::Fault;
using nvme::IoOp;
using nvme::IoRequest;
using nvme::TempDir;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Bytes = std::vector<std::byte>;
constexpr StatePlane kPlanes[] = {StatePlane::kExpAvg, StatePlane::kExpAvgSq,
                                  StatePlane::kMasterRest};
// Below a sector, of one chunk, at the edges of one, and of many.
constexpr int64_t kSizes[] = {0, 1, 63, 129, 1664, 1665, 40001};

Bytes random_values(int64_t numel, DType dtype, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Bytes bytes(static_cast<size_t>(numel) * dtype_bytes(dtype));
  for (size_t i = 0; i < static_cast<size_t>(numel); ++i) {
    const float value = normal(random);
    if (dtype == DType::kF32) {
      std::memcpy(bytes.data() + 4 * i, &value, 4);
    } else {
      const uint16_t half = dtype == DType::kF16 ? float_to_fp16(value) : float_to_bf16(value);
      std::memcpy(bytes.data() + 2 * i, &half, 2);
    }
  }
  return bytes;
}

// One tensor of each size, whose weights are the caller's or the optimizer's own.
struct Model {
  Model(TensorOptimizer& made_for, DType type, DType moments, bool on_drives, bool own = false)
      : optimizer(made_for), dtype(type), moment_dtype(moments) {
    std::vector<TensorSpec> specs;
    for (const int64_t numel : kSizes) {
      weights.push_back(random_values(numel, dtype, static_cast<uint32_t>(numel)));
      TensorSpec spec;
      spec.name = "w" + std::to_string(numel);
      spec.dtype = dtype;
      spec.moment_dtype = moments;
      spec.numel = numel;
      spec.weights = own ? nullptr : weights.back().data();
      spec.seed = static_cast<uint64_t>(numel);
      spec.on_drives = on_drives;
      specs.push_back(spec);
    }
    first = optimizer.add(specs);
    for (size_t i = 0; own && i < weights.size(); ++i) {
      optimizer.adopt_weights(index(i), weights[i].data());
    }
  }

  int64_t index(size_t i) const { return first + static_cast<int64_t>(i); }

  // Returns when it is submitted; the gradients stay.
  void update(int64_t step, bool is_written = true) {
    std::vector<TensorUpdate> updates;
    for (size_t i = 0; i < weights.size(); ++i) {
      const auto seed = static_cast<uint32_t>(100 * step) + static_cast<uint32_t>(i);
      gradients.push_back(random_values(kSizes[i], dtype, seed));
      AdamHyper hyper;
      hyper.step = step;
      hyper.weight_decay = 0.1;
      updates.push_back(
          {index(i), {gradients.back().data(), dtype, kSizes[i]}, hyper, {}, is_written});
    }
    optimizer.update(updates, 0.5f, step);
  }

  Bytes plane(size_t i, StatePlane which) const {
    if (which == StatePlane::kMasterRest && dtype == DType::kF32) return {};
    const size_t element = which != StatePlane::kMasterRest ? dtype_bytes(moment_dtype)
                           : dtype == DType::kBF16          ? 2
                                                            : 4;
    Bytes values(static_cast<size_t>(kSizes[i]) * element);
    optimizer.read_state(index(i), which, 0, values);
    return values;
  }

  std::vector<float> master(size_t i) const {
    std::vector<float> values(static_cast<size_t>(kSizes[i]));
    optimizer.read_master(index(i), values);
    return values;
  }

  Bytes copy(size_t i) const {
    const TensorStates states = optimizer.states(index(i));
    Bytes values(weights[i].size());
    if (!values.empty()) std::memcpy(values.data(), states.weights, values.size());
    return values;
  }

  TensorOptimizer& optimizer;
  DType dtype, moment_dtype;
  int64_t first = 0;
  std::vector<Bytes> weights;
  std::deque<Bytes> gradients;
};

void expect_same(const Model& host, const Model& drives, const std::string& when) {
  host.optimizer.synchronize();
  drives.optimizer.synchronize();
  for (size_t i = 0; i < std::size(kSizes); ++i) {
    const std::string what = when + ", " + std::to_string(kSizes[i]) + " elements";
    ASSERT_TRUE(host.copy(i) == drives.copy(i)) << "weights " << what;
    for (const StatePlane plane : kPlanes) {
      ASSERT_TRUE(host.plane(i, plane) == drives.plane(i, plane))
          << "plane " << static_cast<int>(plane) << " " << what;
    }
    const std::vector<float> expected = host.master(i), found = drives.master(i);
    ASSERT_TRUE(expected.empty() ||
                std::memcmp(expected.data(), found.data(), 4 * expected.size()) == 0)
        << "master " << what;
  }
}

StateDrives small_slots(std::vector<std::string> paths, const std::string& engine = "auto") {
  StateDrives drives;
  drives.nvme.paths = std::move(paths);
  drives.nvme.engine = engine;
  drives.nvme.block_bytes = 8192;
  drives.nvme.verify = "full";
  drives.slot_bytes = 5 * 4096;  // 1664 elements of 12 bytes and less
  drives.host_bytes = 4 * drives.slot_bytes;
  return drives;
}

std::string error_of(ErrorCode code, const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

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

TEST_P(StatesOnDrives, StepsHaveTheBitsOfStatesInHostMemory) {
  const auto [dtype, moments] = GetParam();
  for (const std::string engine : {"auto", "threads"}) {
    const TempDir one, two;
    TensorOptimizer in_memory(2);
    TensorOptimizer on_drives(2, small_slots({one.path(), two.path()}, engine));
    Model host(in_memory, dtype, moments, false);
    Model drives(on_drives, dtype, moments, true);
    for (int64_t step = 1; step <= 4; ++step) {
      host.update(step);
      drives.update(step);
      if (step % 2 == 0) expect_same(host, drives, engine + ", step " + std::to_string(step));
    }
  }
}

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

// ---------------------------------------------------------------------------------------------------
// Order and errors

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

class Faults {
 public:
  explicit Faults(nvme::FaultPlan plan) {
    nvme::decorate_io_backends([plan = std::move(plan)](std::unique_ptr<nvme::IoBackend> backend) {
      return std::make_unique<nvme::FaultyBackend>(std::move(backend), plan);
    });
  }
  ~Faults() { nvme::decorate_io_backends(nullptr); }
};

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
    IoOp op;
    int skip;  // requests that still succeed
    Fault fault;
    const char* text;
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
      EXPECT_THAT(text, AllOf(HasSubstr(c.op == IoOp::kRead ? "swap_in" : "swap_out"),
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
