// Faults of drives below a whole engine: each ends in the same bits, or in one error that names
// operation, shard, path and offset, after which the last checkpoint resumes.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "nvme/io_backend.h"
#include "nvme/shard_file.h"
#include "orlop/drives.h"
#include "orlop/engine.h"
#include "tests/formats/support.h"
#include "tests/nvme/child.h"
#include "tests/nvme/faulty_backend.h"
#include "tests/nvme/fuse_mount.h"
#include "tests/nvme/mounts.h"
#include "tests/support/engine_run.h"
#include "tests/support/process.h"
#include "tests/support/tiny_model.h"

namespace orlop::test {
namespace {

namespace fs = std::filesystem;
using nvme::Fault;
using nvme::Faults;
using nvme::IoOp;
using nvme::IoRequest;
using ::testing::HasSubstr;

class SwapFaults : public ::testing::Test {
 protected:
  SwapFaults() {
    write_tiny_model(folder_ / "model", TinyFamily::kLlamaTied);
    config_ = tiny_engine_config(Precision::kBF16);
    expected_ = run(*Engine::open(model(), config_), {.until = kLast});
    config_.nvme.paths = {(folder_ / "swap").string()};
    config_.placement.nvme_optimizer_blocks = 5;
    config_.placement.nvme_param_blocks = 3;
    config_.placement.swap_chunk = 4096;
    config_.placement.resident_blocks = 1;  // weights come from the drive for either pass
  }

  std::string model() const { return (folder_ / "model").string(); }
  std::string run_dir() const { return (folder_ / "run").string(); }

  std::unique_ptr<Engine> open() const { return Engine::open(model(), config_); }

  // The error that a step meets sooner or later from now on.
  static std::string error_of_steps(Engine& engine, int64_t from, ErrorCode code) {
    return error_of(code, [&] { run(engine, {.from = from, .until = from + 3}); });
  }

  // The engine refuses further work; the checkpoint of step 2 resumes as if nothing had happened.
  void expect_resumes(std::unique_ptr<Engine> failed) const {
    EXPECT_THAT(error_of_steps(*failed, 3, ErrorCode::kInternal), HasSubstr("resume"));
    failed.reset();
    nvme::decorate_io_backends(nullptr);
    const auto resumed = open();
    resumed->load_checkpoint(Engine::latest_checkpoint(run_dir()));
    EXPECT_EQ(resumed->steps_done(), 2);
    const RunRecord rest = run(*resumed, {.from = 3, .until = kLast});
    EXPECT_TRUE(same_states(expected_.states, rest.states));
    EXPECT_EQ(rest.losses.back(), expected_.losses.back());
  }

  static constexpr int64_t kLast = 6;
  TempFolder folder_;
  EngineConfig config_;
  RunRecord expected_;
};

// Cases S-10 and S-13: requests of an engine that has opened, trained two steps and saved are let
// through. A drive that is full in the middle tells what is free.
TEST_F(SwapFaults, AnUnreadableOrUnwritableChunkIsOneErrorAndTheCheckpointResumes) {
  struct Case {
    IoOp op;
    int skip;  // requests of that kind in the failing step that still succeed
    const char* operation;
    int error = EIO;
    const char* reason = "Input/output error";
  };
  for (const Case c : {Case{IoOp::kRead, 0, "swap_in of shard"},
                       {IoOp::kRead, 9, "swap_in of shard"},
                       {IoOp::kRead, 40, "swap_in of shard"},
                       {IoOp::kWrite, 0, "swap_out of shard"},
                       {IoOp::kWrite, 7, "swap_out of shard"},
                       {IoOp::kWrite, 7, "swap_out of shard", ENOSPC, "are free"}}) {
    std::atomic<bool> broken{false};
    std::atomic<int> seen{0};
    const Faults faults([&](const IoRequest& request, uint64_t) {
      const bool fails = broken && request.op == c.op && seen++ >= c.skip;
      return fails ? Fault::fail(c.error) : Fault::none();
    });
    auto engine = open();
    run(*engine, {.until = 2});
    fs::remove_all(run_dir());
    engine->save_checkpoint(run_dir(), "", 1);
    broken = true;
    const std::string text = error_of_steps(*engine, 3, ErrorCode::kIo);
    EXPECT_THAT(text, HasSubstr(c.operation));
    EXPECT_THAT(text, HasSubstr("orlop-r0.swap"));
    EXPECT_THAT(text, HasSubstr("offset"));
    EXPECT_THAT(text, HasSubstr(c.reason));
    expect_resumes(std::move(engine));
  }
}

// Where all that is on the drive are block inputs.
TEST_F(SwapFaults, ABlockInputThatIsLostIsOneErrorThatNamesIt) {
  config_.placement.nvme_optimizer_blocks = config_.placement.nvme_param_blocks = 0;
  config_.placement.activations = Tier::kNvme;
  struct Case {
    IoOp op;
    int skip;
    const char* operation;
    Fault fault;
    const char* reason;
  };
  for (const Case& c :
       {Case{IoOp::kWrite, 0, "swap_out of shard", Fault::fail(EIO), "Input/output"},
        {IoOp::kWrite, 2, "swap_out of shard", Fault::fail(ENOSPC), "No space left"},
        {IoOp::kRead, 0, "swap_in of shard", Fault::fail(EIO), "Input/output"},
        {IoOp::kRead, 2, "swap_in of shard", Fault::flip(100), "checksum"}}) {
    config_.nvme.verify = "full";
    std::atomic<bool> broken{false};
    std::atomic<int> seen{0};
    const Faults faults([&](const IoRequest& request, uint64_t) {
      return broken && request.op == c.op && seen++ >= c.skip ? c.fault : Fault::none();
    });
    auto engine = open();
    run(*engine, {.until = 2});
    fs::remove_all(run_dir());
    engine->save_checkpoint(run_dir(), "", 1);
    broken = true;
    const std::string text = error_of_steps(*engine, 3, ErrorCode::kIo);
    EXPECT_THAT(text, HasSubstr("block input of layer."));
    EXPECT_THAT(text, HasSubstr("micro-batch"));
    EXPECT_THAT(text, HasSubstr(c.operation));
    EXPECT_THAT(text, HasSubstr("orlop-r0.swap"));
    EXPECT_THAT(text, HasSubstr("offset"));
    EXPECT_THAT(text, HasSubstr(c.reason));
    expect_resumes(std::move(engine));
  }
}

TEST_F(SwapFaults, BlockInputsSurviveShortLateAndRepeatedTransfers) {
  config_.placement.activations = Tier::kNvme;
  const Faults faults([](const IoRequest& request, uint64_t nth) {
    if (nth % 5 == 1) return Fault::cut(request.bytes / 2 + nth % 97);
    if (nth % 5 == 2) return Fault::fail(nth % 2 == 0 ? EINTR : EAGAIN);
    return Fault::late(std::chrono::microseconds((nth * 7919) % 300));
  });
  EXPECT_TRUE(same_bits(expected_, run(*open(), {.until = kLast})));
}

TEST_F(SwapFaults, ShortLateAndRepeatedTransfersGiveTheSameBits) {
  const Faults faults([](const IoRequest& request, uint64_t nth) {
    if (nth % 5 == 1) return Fault::cut(request.bytes / 2 + nth % 97);
    if (nth % 5 == 2) return Fault::fail(nth % 2 == 0 ? EINTR : EAGAIN);
    return Fault::late(std::chrono::microseconds((nth * 7919) % 300));
  });
  const auto engine = open();
  EXPECT_TRUE(same_bits(expected_, run(*engine, {.until = kLast})));
}

// Case S-20: what the caller throws is what is seen: the engine that goes with it waits for its
// drives, says nothing and leaves nothing behind.
TEST_F(SwapFaults, AnExceptionOfTheCallerEndsTheEngineWhileTransfersAreUnderWay) {
  const Faults faults([](const IoRequest& request, uint64_t) {
    return Fault::late(std::chrono::milliseconds(request.op == IoOp::kWrite ? 5 : 0));
  });
  config_.threads = 5;  // from which on updates run beside what the caller does
  const auto begin = std::chrono::steady_clock::now();
  try {
    const auto engine = open();
    engine->step(batches_of_step(config_, 61, 1));
    throw std::runtime_error("the loss is not a number");
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "the loss is not a number");
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  EXPECT_TRUE(fs::is_empty(folder_ / "swap"));
}

TEST_F(SwapFaults, AFlippedBitIsFoundBeforeItIsUsed) {
  config_.nvme.verify = "full";
  std::atomic<bool> broken{false};
  const Faults faults([&](const IoRequest& request, uint64_t) {
    return broken && request.op == IoOp::kRead ? Fault::flip(request.bytes / 2) : Fault::none();
  });
  auto engine = open();
  run(*engine, {.until = 2});
  engine->save_checkpoint(run_dir(), "", 1);
  broken = true;
  EXPECT_THAT(error_of_steps(*engine, 3, ErrorCode::kIo), HasSubstr("checksum"));
  expect_resumes(std::move(engine));
}

TEST_F(SwapFaults, ASwapFileThatSomethingElseCutIsAnError) {
  auto engine = open();
  run(*engine, {.until = 2});
  engine->save_checkpoint(run_dir(), "", 1);
  fs::resize_file(folder_ / "swap" / "orlop-r0.swap", 8192);
  EXPECT_THAT(error_of_steps(*engine, 3, ErrorCode::kIo), HasSubstr("orlop-r0.swap"));
  expect_resumes(std::move(engine));
}

// The open file stays; only its name has gone.
TEST_F(SwapFaults, ARemovedDirectoryDoesNotDisturbTheRun) {
  const auto engine = open();
  run(*engine, {.until = 2});
  fs::remove_all(folder_ / "swap");
  EXPECT_TRUE(same_states(expected_.states, run(*engine, {.from = 3, .until = kLast}).states));
}

// Cases S-11 and S-12: where the page cache cannot be passed by, or a layer lies between: the same
// bits, and one line that says so. ext4 has no direct I/O while it journals data.
TEST_F(SwapFaults, EveryFileSystemGivesTheSameBits) {
  struct Place {
    const char* name;
    nvme::Mount mount;
    bool may_be_direct;
  };
  std::vector<Place> places;
  places.push_back({"tmpfs", nvme::Mount::tmpfs(8), false});
  places.push_back({"overlay", nvme::Mount::overlay(), true});
  places.push_back({"ext4", nvme::Mount::ext4(32, 512, "data=journal"), false});
  for (const Place& place : places) {
    ORLOP_SKIP_UNLESS_MOUNTED(place.mount);
    const DriveReport report = report_drive(place.mount.path());
    EXPECT_EQ(report.file_system, place.name);
    EXPECT_TRUE(place.may_be_direct || !report.direct) << place.name;
    config_.nvme.paths = {place.mount.path() + "/swap"};
    for (const std::string engine : {"io_uring", "threads"}) {
      if (engine == "io_uring" && report_io().engine != engine) continue;
      config_.nvme.engine = engine;
      testing::internal::CaptureStderr();
      const RunRecord found = run(*open(), {.until = kLast});
      const std::string said = testing::internal::GetCapturedStderr();
      EXPECT_TRUE(same_bits(expected_, found)) << place.name << " through " << engine;
      if (report.direct) continue;
      EXPECT_THAT(said, testing::AnyOf(HasSubstr("lives in memory: swapping there uses RAM"),
                                       HasSubstr("go through the page cache: ext4 has no direct")))
          << place.name;
      EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
    }
  }
}

// Case S-11: a file system in user space, where nothing can be allocated ahead.
TEST_F(SwapFaults, AFileSystemInUserSpaceGivesTheSameBits) {
  const nvme::FuseMount mount;
  ORLOP_SKIP_UNLESS_MOUNTED(mount);
  config_.nvme.paths = {mount.path()};
  for (const std::string engine : {"io_uring", "threads"}) {
    if (engine == "io_uring" && report_io().engine != engine) continue;
    config_.nvme.engine = engine;
    testing::internal::CaptureStderr();
    const RunRecord found = run(*open(), {.until = kLast});
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_TRUE(same_bits(expected_, found)) << engine;
    // Where it takes direct requests, as newer kernels do, there is nothing to tell.
    EXPECT_LE(std::count(said.begin(), said.end(), '\n'), 1) << said;
    EXPECT_TRUE(fs::is_empty(mount.path())) << engine;
  }
}

// Case S-13: what was freed is enough for the next start.
TEST_F(SwapFaults, AFullDriveIsFoundAtTheStartWithTheBytesMissing) {
  auto mount = nvme::Mount::tmpfs(1);
  ORLOP_SKIP_UNLESS_MOUNTED(mount);
  const size_t need = Engine::plan(model(), config_).nvme_bytes;
  config_.nvme.paths = {mount.path()};
  config_.limits.nvme_bytes = 2 * need;
  const size_t available = fs::space(mount.path()).available;
  spill(fs::path(mount.path()) / "ballast", std::string(available - need / 2, 'x'));
  const std::string text = error_of(ErrorCode::kDoesNotFit, [&] { open(); });
  EXPECT_THAT(text, HasSubstr(mount.path()));
  EXPECT_THAT(text, HasSubstr("bytes are missing"));
  fs::remove(fs::path(mount.path()) / "ballast");
  EXPECT_TRUE(same_bits(expected_, run(*open(), {.until = kLast})));
}

// What a run that was killed holds there is free for the next one.
TEST_F(SwapFaults, ADriveThatAKilledRunFilledHasRoomForTheNext) {
  auto mount = nvme::Mount::tmpfs(4);
  ORLOP_SKIP_UNLESS_MOUNTED(mount);
  const size_t available = fs::space(mount.path()).available;
  nvme::KillableChild child([&] {
    static nvme::ShardFile* file = new nvme::ShardFile({mount.path(), 0, "dead", true});
    file->reserve(file->alignment(), available / 4 * 3 / 4096 * 4096, 0);
  });
  ASSERT_TRUE(child.ready());
  config_.nvme.paths = {mount.path()};
  const size_t beside = Engine::plan(model(), config_).nvme_budget_bytes;
  child.kill();
  EXPECT_GT(Engine::plan(model(), config_).nvme_budget_bytes, beside + available / 2);
  EXPECT_TRUE(same_bits(expected_, run(*open(), {.until = kLast})));
}

TEST_F(SwapFaults, TooLittleNvmeIsRefusedByThePlanWithTheShortage) {
  const size_t need = Engine::plan(model(), config_).nvme_bytes;
  config_.limits.nvme_bytes = need - 1;
  EXPECT_THAT(error_of(ErrorCode::kDoesNotFit, [&] { Engine::plan(model(), config_); }),
              HasSubstr("nvme: needs at least"));
  config_.limits.nvme_bytes = need;
  EXPECT_EQ(Engine::plan(model(), config_).nvme_bytes, need);
}

TEST_F(SwapFaults, NoRoomForACheckpointIsFoundAtTheStart) {
  auto mount = nvme::Mount::tmpfs(1);
  ORLOP_SKIP_UNLESS_MOUNTED(mount);
  config_.checkpoint_dir = mount.path() + "/run";
  const size_t need = Engine::plan(model(), config_).save_bytes;
  const size_t available = fs::space(mount.path()).available;
  spill(fs::path(mount.path()) / "ballast", std::string(available - need / 2, 'x'));
  EXPECT_THAT(error_of(ErrorCode::kDoesNotFit, [&] { open(); }), HasSubstr("a checkpoint takes"));
  fs::remove(fs::path(mount.path()) / "ballast");
  const auto engine = open();
  run(*engine, {.until = 1});
  EXPECT_NO_THROW(engine->save_checkpoint(config_.checkpoint_dir, "", 1));
}

TEST_F(SwapFaults, RoomForSomeCheckpointsIsCountedWithWhatTheNextSaveRemoves) {
  auto mount = nvme::Mount::tmpfs(1);
  ORLOP_SKIP_UNLESS_MOUNTED(mount);
  config_.checkpoint_dir = mount.path() + "/run";
  const size_t need = Engine::plan(model(), config_).save_bytes;
  const size_t available = fs::space(mount.path()).available;
  config_.checkpoint_room = static_cast<int>(available / need) + 1;
  EXPECT_THAT(error_of(ErrorCode::kDoesNotFit, [&] { open(); }),
              HasSubstr(fmt::format("room is needed for {} more", config_.checkpoint_room)));
  config_.checkpoint_room = 1;
  fs::create_directories(config_.checkpoint_dir + "/step-9.tmp");
  spill(fs::path(config_.checkpoint_dir) / "step-9.tmp" / "half",
        std::string(available - need / 2, 'x'));
  const auto engine = open();
  run(*engine, {.until = 1});
  EXPECT_NO_THROW(engine->save_checkpoint(config_.checkpoint_dir, "", 1));
}

// The step that would pass the limit is refused before it begins: what is there can be saved, and
// goes on with a higher limit, though the count of the day stays.
TEST_F(SwapFaults, TheLimitOfWritesPerDayStopsTheRunBetweenSteps) {
  const size_t per_step = Engine::plan(model(), config_).nvme_written_bytes;
  config_.limits.nvme_writes_per_day_bytes = 5 * per_step;
  auto engine = open();
  int64_t steps = 0;
  const std::string text = error_of(ErrorCode::kDoesNotFit, [&] {
    for (; steps < 10; ++steps) run(*engine, {.from = steps + 1, .until = steps + 1});
  });
  EXPECT_THAT(text, HasSubstr("limits.nvme_writes_per_day"));
  EXPECT_GE(steps, 2);
  EXPECT_LE(steps, 4);
  EXPECT_LE(engine->stats().nvme_written_bytes, 5 * per_step);
  EXPECT_EQ(engine->steps_done(), steps);
  engine->save_checkpoint(run_dir(), "", 1);
  engine.reset();

  config_.limits.nvme_writes_per_day_bytes = 100 * per_step;
  const auto resumed = open();
  EXPECT_GT(resumed->stats().nvme_written_today_bytes, resumed->stats().nvme_written_bytes);
  resumed->load_checkpoint(Engine::latest_checkpoint(run_dir()));
  const RunRecord rest = run(*resumed, {.from = steps + 1, .until = kLast});
  EXPECT_TRUE(same_states(expected_.states, rest.states));
}

// Case U-08, of drives: a header's pages are all that the file has beside what was planned.
TEST_F(SwapFaults, CountersTellWhatWasPlanned) {
  const auto engine = open();
  run(*engine, {.until = 1});
  const auto planned = static_cast<double>(engine->plan().nvme_bytes);
  EXPECT_NEAR(static_cast<double>(fs::file_size(folder_ / "swap" / "orlop-r0.swap")), planned,
              0.05 * planned);
  const Stats before = engine->stats();
  engine->step(batches_of_step(config_, 61, 2));
  std::vector<float> value(static_cast<size_t>(engine->tensors().front().shape.front() *
                                               engine->tensors().front().shape.back()));
  // Reading waits for the update; it reads chunks, and writes none.
  engine->read_state(engine->tensors().front().name, StateKind::kMaster, value);
  const Stats after = engine->stats();
  EXPECT_EQ(after.nvme_written_bytes - before.nvme_written_bytes,
            engine->plan().nvme_written_bytes);
  EXPECT_GE(after.nvme_read_bytes - before.nvme_read_bytes, engine->plan().nvme_read_bytes);
}

// The losses of a process whose swapping meets the shim's faults, and its last line.
struct ShimmedRun {
  std::vector<std::string> losses;
  std::string error;
};

ShimmedRun run_with_shim(const fs::path& folder, const std::string& faults) {
  ChildProcess worker({"/usr/bin/env", std::string("LD_PRELOAD=") + ORLOP_IO_SHIM_LIBRARY,
                       "ORLOP_IO_SHIM=" + faults, ORLOP_TRAIN_WORKER, "swap",
                       (folder / "model").string(), (folder / "swap").string(), "threads"});
  ShimmedRun run;
  while (const std::optional<std::string> line = worker.read_line()) {
    if (line->starts_with("loss ")) run.losses.push_back(*line);
    if (line->starts_with("error ")) run.error = *line;
  }
  EXPECT_EQ(worker.wait(), 0);
  return run;
}

// The kernel's own calls, below the backend that uses them.
TEST(SwapThreads, MeetTheSameFaultsBelowThem) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer's runtime must be the first library";
  const TempFolder folder;
  write_tiny_model(folder / "model", TinyFamily::kLlamaTied);
  const ShimmedRun plain = run_with_shim(folder.path(), "");
  ASSERT_EQ(plain.losses.size(), 4U) << plain.error;
  for (const char* harmless : {"short", "eintr"}) {
    const ShimmedRun run = run_with_shim(folder.path(), harmless);
    EXPECT_EQ(run.losses, plain.losses) << harmless << ": " << run.error;
  }
  struct Broken {
    const char* faults;
    const char* operation;
    const char* reason;
  };
  for (const Broken& broken :
       {Broken{"eio:0", "write of 4096 bytes", "Input/output error"},  // the superblock
        {"eio:90", "swap_", "Input/output error"},
        {"enospc:0", "write of 4096 bytes", "No space left on device"},
        {"enospc:40", "swap_out of shard", "No space left on device"}}) {
    const char* const faults = broken.faults;
    const ShimmedRun run = run_with_shim(folder.path(), faults);
    EXPECT_LT(run.losses.size(), 4U) << faults;
    for (const char* part : {broken.operation, broken.reason, "orlop-r0.swap", "offset"}) {
      EXPECT_THAT(run.error, HasSubstr(part)) << faults;
    }
    EXPECT_TRUE(fs::is_empty(folder / "swap")) << faults;
  }
}

}  // namespace
}  // namespace orlop::test
