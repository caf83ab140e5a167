// An engine in a process that forks, as data loaders do: the child leaves it alone, whatever was
// under way, and the parent goes on as if nothing had been.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <memory>

#include "orlop/engine.h"
#include "orlop/error.h"
#include "tests/formats/support.h"
#include "tests/support/engine_run.h"
#include "tests/support/tiny_model.h"

namespace orlop::test {
namespace {

enum Ending { kAsExpected = 0, kNotRefused = 1, kOtherError = 2 };

template <typename Call>
Ending refused(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return std::strstr(error.what(), "fork") != nullptr ? kAsExpected : kOtherError;
  }
  return kNotRefused;
}

// What the child does with the engine: every kind of call, then the end.
Ending use(std::unique_ptr<Engine> engine, const std::vector<MicroBatch>& batches) {
  for (const Ending ending :
       {refused([&] { engine->step(batches); }), refused([&] { engine->evaluate(batches); }),
        refused([&] { engine->synchronize(); }), refused([&] { engine->wait_for_save(); }),
        refused([&] { read_states(*engine); })}) {
    if (ending != kAsExpected) return ending;
  }
  return kAsExpected;
}

TEST(ForkedEngine, IsRefusedAndLeftAlone) {
  const TempFolder folder;
  write_tiny_model(folder.path(), TinyFamily::kLlamaTied);
  EngineConfig config = tiny_engine_config(Precision::kBF16);
  config.nvme.paths = {(folder / "drive").string()};
  std::filesystem::create_directory(folder / "drive");
  config.placement.nvme_optimizer_blocks = 2;
  const std::string model = folder.path().string();
  const RunRecord expected = run(*Engine::open(model, config), {.until = 4, .last = 20});

  std::unique_ptr<Engine> engine = Engine::open(model, config);
  RunRecord found = run(*engine, {.until = 2, .last = 20});
  const auto batches = batches_of_step(config, 61, 3);
  const StepResult third = engine->step(batches);  // its update still runs
  engine->save_checkpoint((folder / "run").string(), "", 1, SaveMode::kBackground);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(10);  // a join of a thread that is not there would wait for ever
    ::_exit(use(std::move(engine), batches));
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(third.loss, expected.losses[2]);
  EXPECT_EQ(engine->step(batches_of_step(config, 61, 4)).loss, expected.losses[3]);
  EXPECT_TRUE(same_states(expected.states, read_states(*engine)));
  engine->wait_for_save();
  EXPECT_NE(Engine::latest_checkpoint((folder / "run").string()), "");
}

}  // namespace
}  // namespace orlop::test
