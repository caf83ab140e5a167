#include "optim/optimizer_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <limits>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "orlop/error.h"

namespace orlop {
namespace {

// An event that the test lets happen, or fail.
class ManualEvent final : public Event {
 public:
  void synchronize() override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return happened_; });
    if (!error_.empty()) throw Error(ErrorCode::kDevice, error_);
  }
  bool query() const override { return false; }

  void happen(const std::string& error = "") {
    {
      std::lock_guard lock(mutex_);
      happened_ = true;
      error_ = error;
    }
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool happened_ = false;
  std::string error_;
};

void await(const std::atomic<uint32_t>& gate, uint32_t version) {
  for (uint32_t value = gate.load(); value < version; value = gate.load()) gate.wait(value);
}

// Two fp32 FlatParams of four elements.
class OptimizerQueueTest : public ::testing::Test {
 protected:
  static constexpr int64_t kNumel = 4;
  struct Param {
    std::vector<float> master = {1, 2, 3, 4};
    std::vector<float> exp_avg = std::vector<float>(kNumel);
    std::vector<float> exp_avg_sq = std::vector<float>(kNumel);
    std::vector<float> grad = {1, -1, 1, -1};
    std::atomic<uint32_t> gate{0};
    StepScalars scalars;
    ManualEvent arrival;
  };

  HostUpdate update(int param) {
    Param& p = params_[param];
    AdamShard shard;
    shard.compute_dtype = shard.moment_dtype = shard.grad_dtype = DType::kF32;
    shard.master = p.master.data();
    shard.exp_avg = p.exp_avg.data();
    shard.exp_avg_sq = p.exp_avg_sq.data();
    shard.grad = p.grad.data();
    shard.numel = kNumel;
    return {param, {{shard, true, 0}}, {&p.gate}};
  }

  UpdateJob job(int param, uint32_t version = 1) {
    UpdateJob job;
    job.param = param;
    job.arrivals[0] = &params_[param].arrival;
    job.scalars = &params_[param].scalars;
    job.hyper.lr = 0.5;
    job.hyper.step = version;
    job.version = version;
    return job;
  }

  Param params_[2];
};

TEST_F(OptimizerQueueTest, AnUpdateWaitsForItsGradientAndThoseBehindItKeepTheirOrder) {
  OptimizerQueue queue({update(1), update(0)}, 1, nullptr);
  queue.submit(job(1));
  queue.submit(job(0));
  params_[0].arrival.happen();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(params_[0].gate.load(), 0u);
  EXPECT_EQ(params_[1].gate.load(), 0u);
  params_[1].arrival.happen();
  queue.wait_idle();
  for (const Param& p : params_) {
    EXPECT_EQ(p.gate.load(), 1u);
    EXPECT_NEAR(p.master[0], 0.5, 1e-5);
    EXPECT_NEAR(p.master[1], 2.5, 1e-5);
  }
}

TEST_F(OptimizerQueueTest, AGateOpensUnderTheRestOfTheUpdates) {
  OptimizerQueue queue({update(0), update(1)}, 1, nullptr);
  queue.submit(job(0));
  queue.submit(job(1));
  params_[0].arrival.happen();
  await(params_[0].gate, 1);
  EXPECT_NEAR(params_[0].master[0], 0.5, 1e-5);
  EXPECT_EQ(params_[1].master[0], 1);
  params_[1].arrival.happen();
  queue.wait_idle();
}

TEST_F(OptimizerQueueTest, ASaveHoldsTheUpdateOfWhatItStillReads) {
  OptimizerQueue queue({update(0), update(1)}, 1, nullptr);
  std::atomic<uint32_t> saved{2};
  for (int param : {0, 1}) {
    params_[param].arrival.happen();
    UpdateJob held = job(param);
    held.saved = {&saved};
    held.saved_version = param == 0 ? 2 : 3;
    queue.submit(held);
  }
  await(params_[0].gate, 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(params_[1].gate.load(), 0u);
  EXPECT_EQ(params_[1].master[0], 1);
  open_gate({&saved}, 3);
  queue.wait_idle();
  EXPECT_NEAR(params_[1].master[0], 0.5, 1e-5);
  EXPECT_GE(queue.held_seconds(), 0.01);
}

TEST_F(OptimizerQueueTest, AFlatParamThatIsSkippedStaysAndItsGateOpens) {
  OptimizerQueue queue({update(0), update(1)}, 1, nullptr);
  params_[0].scalars.skip = 1;
  for (int param : {0, 1}) {
    params_[param].arrival.happen();
    queue.submit(job(param));
  }
  queue.wait_idle();
  EXPECT_EQ(params_[0].master, (std::vector<float>{1, 2, 3, 4}));
  EXPECT_EQ(params_[0].gate.load(), 1u);
  EXPECT_NEAR(params_[1].master[0], 0.5, 1e-5);
}

TEST_F(OptimizerQueueTest, AFailedArrivalOpensEveryGateAndSurfacesAtTheNextCall) {
  OptimizerQueue queue({update(0), update(1)}, 1, nullptr);
  queue.submit(job(0, 7));
  params_[0].arrival.happen("the link is gone");
  await(params_[1].gate, Gate::kFailed);
  EXPECT_EQ(params_[0].gate.load(), Gate::kFailed);
  for (const bool submits : {true, false}) {
    try {
      submits ? queue.submit(job(1, 7)) : queue.wait_idle();
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDevice);
      EXPECT_STREQ(error.what(), "update of step 7: the link is gone");
    }
  }
  EXPECT_EQ(params_[0].master, (std::vector<float>{1, 2, 3, 4}));
}

TEST_F(OptimizerQueueTest, FinishesWhatIsQueuedWhenItEnds) {
  {
    OptimizerQueue queue({update(0), update(1)}, 1, nullptr);
    queue.submit(job(0));
    queue.submit(job(1));
    for (Param& p : params_) p.arrival.happen();
  }
  for (const Param& p : params_) EXPECT_EQ(p.gate.load(), 1u);
}

}  // namespace
}  // namespace orlop
