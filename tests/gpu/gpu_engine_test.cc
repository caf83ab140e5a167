// What only an engine on a GPU can be asked: the driver's own count of the memory it takes, and the
// losses of the host backend.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>

#include "base/bytes.h"
#include "orlop/engine.h"
#include "tests/formats/support.h"
#include "tests/support/engine_run.h"
#include "tests/support/tiny_model.h"

namespace orlop::test {
namespace {

bool has_gpu() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

class GpuEngine : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_gpu()) GTEST_SKIP() << "no GPU";
  }

  TempFolder folder_;
};

size_t used_bytes() {
  size_t free = 0;
  size_t total = 0;
  EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  return total - free;
}

// The driver counts the context too, which lives as long as the process: it is in the plan, so the
// whole device's use, less what others had before the context, is what was promised.
TEST_F(GpuEngine, TakesTheDeviceMemoryOfItsPlan) {
  TinyShape shape;
  shape.hidden = 1024;
  shape.intermediate = 2816;
  shape.heads = 8;
  shape.vocab = 32000;
  shape.positions = 512;
  spill(folder_ / "config.json", tiny_config(TinyFamily::kLlama, shape));
  EngineConfig config = tiny_engine_config(Precision::kBF16);
  config.from_scratch = true;
  config.batch = {.micro_batch_size = 8, .sequence_length = 512, .accumulation_steps = 2};
  for (const size_t budget : {2 * kGiB, 4 * kGiB}) {
    config.limits.device_bytes = budget;
    size_t peak = 0;
    {
      const auto engine = Engine::open(folder_.path().string(), config);
      for (int64_t step = 1; step <= 3; ++step) {
        engine->step(batches_of_step(config, shape.vocab, step));
        peak = std::max(peak, used_bytes());
      }
      const double planned = static_cast<double>(engine->plan().device_peak_bytes);
      RecordProperty("planned_mib", std::to_string(planned / 1048576));
      RecordProperty("taken_mib", std::to_string(static_cast<double>(peak) / 1048576));
      EXPECT_NEAR(static_cast<double>(peak), planned, 0.05 * planned) << format_bytes(budget);
      EXPECT_LE(peak, budget);
    }
  }
}

TEST_F(GpuEngine, LossesAreThoseOfTheHost) {
  struct Case {
    Precision precision;
    double tolerance;  // relative
  };
  for (const TinyFamily family : {TinyFamily::kLlamaTied, TinyFamily::kQwen3, TinyFamily::kGpt2}) {
    const std::string model = (folder_ / std::to_string(static_cast<int>(family))).string();
    write_tiny_model(model, family);
    for (const Case c :
         {Case{Precision::kF32, 1e-4}, Case{Precision::kBF16, 1e-2}, Case{Precision::kF16, 1e-2}}) {
      EngineConfig config = tiny_engine_config(c.precision);
      config.optimizer.learning_rate = 1e-3;
      const RunOptions options{.until = 50, .last = 50};
      const RunRecord gpu = run(*Engine::open(model, config), options);
      config.device = "host";
      const RunRecord host = run(*Engine::open(model, config), options);
      ASSERT_EQ(gpu.skipped, host.skipped);
      for (size_t i = 0; i < host.losses.size(); ++i) {
        EXPECT_NEAR(gpu.losses[i], host.losses[i], c.tolerance * host.losses[i])
            << "family " << static_cast<int>(family) << ", precision "
            << static_cast<int>(c.precision) << ", step " << i + 1;
      }
    }
  }
}

TEST_F(GpuEngine, ABadDeviceIndexIsOneClearError) {
  write_tiny_model(folder_.path(), TinyFamily::kLlama);
  EngineConfig config = tiny_engine_config(Precision::kBF16);
  config.device = "cuda:99";
  const std::string text =
      error_of(ErrorCode::kUsage, [&] { Engine::open(folder_.path().string(), config); });
  EXPECT_NE(text.find("device index 99"), std::string::npos) << text;
}

TEST_F(GpuEngine, ABudgetThatCannotHoldTheStepNamesTheShortage) {
  TinyShape shape;
  shape.positions = 8192;
  write_tiny_model(folder_.path(), TinyFamily::kLlama, shape);
  EngineConfig config = tiny_engine_config(Precision::kBF16);
  config.batch.sequence_length = 8192;
  config.batch.micro_batch_size = 64;
  config.limits.device_bytes = kGiB;
  const std::string text =
      error_of(ErrorCode::kDoesNotFit, [&] { Engine::open(folder_.path().string(), config); });
  EXPECT_NE(text.find("1.00 GiB"), std::string::npos) << text;
}

// Twenty engines, one after the other, in one process.
TEST_F(GpuEngine, GivesTheDeviceMemoryBack) {
  write_tiny_model(folder_.path(), TinyFamily::kLlamaTied);
  const EngineConfig config = tiny_engine_config(Precision::kBF16);
  size_t second = 0;
  for (int i = 1; i <= 20; ++i) {
    run(*Engine::open(folder_.path().string(), config), {.until = 2});
    if (i == 2) second = used_bytes();
  }
  EXPECT_LE(used_bytes(), second + (size_t{16} << 20));
}

}  // namespace
}  // namespace orlop::test
