#include "tests/support/engine_run.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <span>

#include "base/check.h"
#include "engine/backend_factory.h"
#include "tests/support/tiny_model.h"

namespace orlop::test {
namespace {

template <typename T>
::testing::AssertionResult same_doubles(const char* what, const std::vector<T>& expected,
                                        const std::vector<T>& found) {
  if (expected.size() != found.size()) {
    return ::testing::AssertionFailure()
           << what << ": " << found.size() << " values instead of " << expected.size();
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    if (std::bit_cast<uint64_t>(expected[i]) != std::bit_cast<uint64_t>(found[i])) {
      return ::testing::AssertionFailure() << fmt::format(
                 "{} of step {}: {:.17g} instead of {:.17g}", what, i + 1, found[i], expected[i]);
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace

States read_states(Engine& engine) {
  const std::pair<StateKind, const char*> kinds[] = {{StateKind::kMaster, ".master"},
                                                     {StateKind::kExpAvg, ".exp_avg"},
                                                     {StateKind::kExpAvgSq, ".exp_avg_sq"}};
  States states;
  for (const TensorDescription& tensor : engine.tensors()) {
    const int64_t numel =
        std::accumulate(tensor.shape.begin(), tensor.shape.end(), int64_t{1}, std::multiplies<>());
    for (const auto& [kind, suffix] : kinds) {
      std::vector<float>& values = states[tensor.name + suffix];
      values.resize(static_cast<size_t>(numel));
      engine.read_state(tensor.name, kind, values);
    }
  }
  return states;
}

std::vector<MicroBatch> batches_of_step(const EngineConfig& config, int64_t vocab, int64_t step) {
  return random_batches(static_cast<int>(config.batch.accumulation_steps), config.batch, vocab,
                        1000 + static_cast<uint64_t>(step));
}

RunRecord run(Engine& engine, const RunOptions& options) {
  RunRecord record;
  for (int64_t step = options.from; step <= options.until; ++step) {
    const std::vector<MicroBatch> batches = batches_of_step(engine.config(), options.vocab, step);
    if (options.evaluate_between) {
      engine.evaluate(batches_of_step(engine.config(), options.vocab, 100 + step));
    }
    const size_t used = batches.size() - (step == options.last && batches.size() > 1 ? 1 : 0);
    const StepResult result = engine.step(std::span(batches).first(used));
    record.losses.push_back(result.loss);
    record.norms.push_back(result.grad_norm);
    record.skipped.push_back(result.skipped);
  }
  record.states = read_states(engine);
  return record;
}

::testing::AssertionResult same_states(const States& expected, const States& found) {
  if (expected.size() != found.size()) {
    return ::testing::AssertionFailure()
           << found.size() << " states instead of " << expected.size();
  }
  for (const auto& [name, values] : expected) {
    const auto other = found.find(name);
    if (other == found.end()) return ::testing::AssertionFailure() << "no state " << name;
    if (other->second.size() != values.size()) {
      return ::testing::AssertionFailure()
             << name << " has " << other->second.size() << " elements";
    }
    for (size_t i = 0; i < values.size(); ++i) {
      if (std::bit_cast<uint32_t>(values[i]) != std::bit_cast<uint32_t>(other->second[i])) {
        return ::testing::AssertionFailure() << fmt::format("{}[{}]: {:.9g} instead of {:.9g}",
                                                            name, i, other->second[i], values[i]);
      }
    }
  }
  return ::testing::AssertionSuccess();
}

::testing::AssertionResult same_bits(const RunRecord& expected, const RunRecord& found) {
  if (const auto same = same_doubles("loss", expected.losses, found.losses); !same) return same;
  if (const auto same = same_doubles("norm", expected.norms, found.norms); !same) return same;
  if (expected.skipped != found.skipped) {
    return ::testing::AssertionFailure() << "other steps were skipped";
  }
  return same_states(expected.states, found.states);
}

namespace {

class TestDevice final : public ::testing::Environment {
 public:
  void SetUp() override {
    if (test_device() != "host" && usable_gpus() == 0) GTEST_SKIP() << "no GPU";
  }
};

const ::testing::Environment* const kTestDevice =
    ::testing::AddGlobalTestEnvironment(new TestDevice);

}  // namespace

std::string test_device() {
  const char* const device = std::getenv("ORLOP_TEST_DEVICE");
  return device == nullptr ? "host" : device;
}

EngineConfig tiny_engine_config(Precision precision) {
  EngineConfig config;
  config.device = test_device();
  config.precision = precision;
  config.batch = {.micro_batch_size = 2, .sequence_length = 16, .accumulation_steps = 3};
  config.optimizer.learning_rate = 5e-3;
  config.optimizer.weight_decay = 0.1;
  config.schedule.warmup_steps = 2;
  config.schedule.total_steps = 40;
  config.threads = 1;
  config.seed = 7;
  return config;
}

}  // namespace orlop::test
