// Several GPUs of one machine, a thread each: NCCL against the ranks of host memory, and the engine
// over ranks against one GPU.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "comm/thread_communicator.h"
#include "engine/backend_factory.h"
#include "engine/measure_collectives.h"
#include "engine/open_engine.h"
#include "engine/ranks.h"
#include "gpu/cuda_backend.h"
#include "gpu/cuda_devices.h"
#include "gpu/nccl_communicator.h"
#include "orlop/error.h"
#include "tests/comm/communicator_suite.h"
#include "tests/formats/support.h"
#include "tests/support/process.h"
#include "tests/support/rank_run.h"
#include "tests/support/tiny_model.h"

namespace orlop::test {
namespace {

#define SKIP_WITHOUT_GPUS(count) \
  if (cuda_device_count() < (count)) GTEST_SKIP() << "fewer than " << (count) << " GPUs"

// Every number of ranks that this machine has GPUs for.
std::vector<int> world_sizes() {
  std::vector<int> sizes;
  for (const int ranks : {2, 3, 4}) {
    if (ranks <= cuda_device_count()) sizes.push_back(ranks);
  }
  return sizes;
}

// Host values and failures of the ranks, on threads; no queue is given to it.
void no_queue(Queue&, const CollectiveCall&) {
  throw Error(ErrorCode::kInternal, "a collective of host memory on a GPU's queue");
}

struct Rank {
  NcclCommunicator& comm;
  CudaBackend& backend;
  std::byte* arena;
  Queue& queue() { return backend.queue(QueueKind::kComm); }
};

constexpr size_t kArenaBytes = size_t{256} << 20;

void run_gpus(int world_size, double timeout_seconds, const std::function<void(Rank)>& body) {
  run_ranks(world_size, no_queue, [&](Communicator& host) {
    NcclCommunicator comm(host.rank(), host, timeout_seconds);
    CudaBackend backend(CudaBackendOptions{.device_index = host.rank()});
    body({comm, backend, static_cast<std::byte*>(backend.allocate_arena(kArenaBytes))});
  });
}

template <typename T>
std::vector<T> fetch(Rank& rank, const void* device, size_t count) {
  std::vector<T> values(count);
  rank.queue().offload(values.data(), device, count * sizeof(T));
  rank.queue().synchronize();
  return values;
}

TEST(GpuRanks, GatherScatterExchangeAndBroadcast) {
  SKIP_WITHOUT_GPUS(2);
  for (const int ranks : world_sizes()) {
    run_gpus(ranks, 60, [&](Rank rank) {
      rank.comm.prepare_all_to_all();
      const size_t n = static_cast<size_t>(ranks);
      const size_t self = static_cast<size_t>(rank.comm.rank());
      for (const size_t count : {size_t{1}, size_t{1000}, (size_t{1} << 20) + 3}) {
        SCOPED_TRACE(count);
        const int64_t numel = static_cast<int64_t>(count);
        float* all = reinterpret_cast<float*>(rank.arena);
        const std::vector<float> send = values_of_rank(rank.comm.rank(), count);
        rank.queue().upload(all + self * count, send.data(), count * sizeof(float));
        rank.comm.all_gather(rank.queue(), all + self * count, all, numel, DType::kF32, "test");
        std::vector<float> want;
        for (int r = 0; r < ranks; ++r) {
          const std::vector<float> row = values_of_rank(r, count);
          want.insert(want.end(), row.begin(), row.end());
        }
        EXPECT_EQ(fetch<float>(rank, all, n * count), want);

        // Sums in another order: the bound of n fp32 additions, and the same bits every time.
        const std::vector<float> mine = values_of_rank(rank.comm.rank(), n * count);
        std::vector<float> first;
        for (int round = 0; round < 3; ++round) {
          rank.queue().upload(all, mine.data(), n * count * sizeof(float));
          rank.comm.reduce_scatter(rank.queue(), all, all + self * count, numel, DType::kF32,
                                   "test");
          const std::vector<float> found = fetch<float>(rank, all + self * count, count);
          if (round == 0) first = found;
          EXPECT_EQ(found, first) << "round " << round;
        }
        std::vector<double> sum(count), magnitude(count);
        for (int r = 0; r < ranks; ++r) {
          const std::vector<float> other = values_of_rank(r, n * count);
          for (size_t i = 0; i < count; ++i) {
            sum[i] += static_cast<double>(other[self * count + i]);
            magnitude[i] += std::abs(static_cast<double>(other[self * count + i]));
          }
        }
        for (size_t i = 0; i < count; ++i) {
          ASSERT_NEAR(static_cast<double>(first[i]), sum[i],
                      static_cast<double>(n) * 0x1p-24 * magnitude[i])
              << i;
        }

        // Every rank's row for this one. What is received lies behind what is sent.
        float* received = all + n * count;
        rank.queue().upload(all, mine.data(), n * count * sizeof(float));
        rank.comm.all_to_all(rank.queue(), all, received, numel, DType::kF32, "test");
        want.clear();
        for (int r = 0; r < ranks; ++r) {
          const std::vector<float> other = values_of_rank(r, n * count);
          const auto row = other.begin() + static_cast<std::ptrdiff_t>(self * count);
          want.insert(want.end(), row, row + static_cast<std::ptrdiff_t>(count));
        }
        EXPECT_EQ(fetch<float>(rank, received, n * count), want);

        for (int root = 0; root < ranks; ++root) {
          rank.queue().upload(all, send.data(), count * sizeof(float));
          rank.comm.broadcast(rank.queue(), all, numel, DType::kF32, root, "test");
          EXPECT_EQ(fetch<float>(rank, all, count), values_of_rank(root, count));
        }
      }
    });
  }
}

// The collective that one rank does not join ends on all, with its name.
// Cases D-02, D-06.
TEST(GpuRanks, ACollectiveThatARankDoesNotJoinEndsInTime) {
  SKIP_WITHOUT_GPUS(2);
  const auto begin = std::chrono::steady_clock::now();
  run_gpus(2, 3, [&](Rank rank) {
    if (rank.comm.rank() == 0) {
      rank.comm.all_gather(rank.queue(), rank.arena, rank.arena, 1 << 20, DType::kF32, "layer.3");
      try {
        rank.queue().synchronize();
      } catch (const Error&) {  // whether the stream reports the end is the driver's choice
      }
    }
    std::string told;
    try {
      rank.comm.barrier("step");
    } catch (const Error& error) {
      told = error.what();
    }
    EXPECT_THAT(told, testing::HasSubstr("all_gather of 1048576 F32 (layer.3)"));
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
}

// Case D-07: with as little shared memory as containers have by default (64 MB), and less, ranks
// start or are all told of it; with NCCL's direct way between GPUs, and without.
TEST(GpuRanks, StartWithLittleSharedMemoryOrAreToldOfIt) {
  SKIP_WITHOUT_GPUS(2);
  const std::string as_root = ::geteuid() == 0 ? "" : " --map-root-user";
  for (const char* bytes : {"64m", "1m"}) {
    const std::string little =
        "exec unshare --mount" + as_root + " sh -c 'mount -t tmpfs -o size=" + bytes +
        " tmpfs /dev/shm && echo mounted && exec " ORLOP_NCCL_START_WORKER "' 2>&1";
    for (const char* direct : {"", "NCCL_P2P_DISABLE=1 "}) {
      SCOPED_TRACE(std::string(direct) + bytes);
      ChildProcess run({"/bin/sh", "-c", direct + little});
      std::string output;
      bool is_mounted = false;
      std::vector<std::string> outcomes;
      while (const auto line = run.read_line()) {
        output += *line + '\n';
        is_mounted = is_mounted || *line == "mounted";
        if (line->starts_with("rank ")) outcomes.push_back(line->substr(std::strlen("rank 0 ")));
      }
      const int status = run.wait();
      if (!is_mounted) GTEST_SKIP() << "no mount namespaces here: " << output;
      EXPECT_EQ(status, 0) << output;
      ASSERT_EQ(outcomes.size(), 2u) << output;
      std::printf("%s%s: %s\n", direct, bytes, outcomes.front().c_str());
      if (outcomes.front() == "started") {
        EXPECT_EQ(outcomes.back(), "started");
      } else {
        EXPECT_THAT(outcomes, testing::Each(testing::AllOf(testing::StartsWith("told: "),
                                                           testing::HasSubstr("shared memory"))));
      }
    }
  }
}

EngineConfig gpu_config(Precision precision) {
  EngineConfig config = tiny_engine_config(precision);
  config.device = "cuda";
  config.batch.micro_batch_size = 1;
  config.batch.accumulation_steps = 12;
  config.optimizer.learning_rate = 1e-4;
  config.limits.device_bytes = size_t{4} << 30;
  return config;
}

RunRecord run_engine_on_gpus(int world_size, const std::string& model, EngineConfig config,
                             const RunOptions& options) {
  config.batch.accumulation_steps = 12 / world_size;
  std::mutex mutex;
  std::vector<RunRecord> records;
  run_ranks(world_size, no_queue, [&](Communicator& host) {
    EngineConfig own = config;
    own.device = "cuda:" + std::to_string(host.rank());
    const auto comm = std::make_shared<NcclCommunicator>(host.rank(), host, 60.0);
    const auto engine = open_engine(model, own, comm);
    RunRecord record = run_share(*engine, 12, options);
    std::lock_guard lock(mutex);
    records.push_back(std::move(record));
  });
  for (const RunRecord& record : records) EXPECT_TRUE(same_bits(records.front(), record));
  return records.front();
}

class GpuRanksEngine : public ::testing::Test {
 protected:
  void SetUp() override {
    SKIP_WITHOUT_GPUS(2);
    TinyShape shape;
    shape.hidden = 256;  // heads of 64: what attention on the GPU takes
    shape.intermediate = 384;
    write_tiny_model(folder_.path(), TinyFamily::kLlamaTied, shape);
  }
  std::string model() const { return folder_.path().string(); }

 private:
  TempFolder folder_;
};

TEST_F(GpuRanksEngine, LossesAreThoseOfOneGpu) {
  const EngineConfig config = gpu_config(Precision::kF32);
  const auto engine = Engine::open(model(), config);
  const RunRecord single = run(*engine, {});
  for (const int ranks : world_sizes()) {
    const RunRecord found = run_engine_on_gpus(ranks, model(), config, {});
    for (size_t i = 0; i < single.losses.size(); ++i) {
      EXPECT_NEAR(found.losses[i], single.losses[i], 1e-5 * single.losses[i])
          << ranks << " ranks, step " << i + 1;
    }
  }
}

// Case D-08: states, and the gradients that wait for the norm, are in host memory, and nothing but
// NCCL moves what ranks have on their devices.
TEST_F(GpuRanksEngine, NormOfOffloadedStatesIsThatOfOneGpu) {
  EngineConfig config = gpu_config(Precision::kF32);
  config.optimizer.max_grad_norm = 1.0;
  config.placement.resident_blocks = 0;
  config.placement.device_optimizer_blocks = 0;
  const RunOptions options{.until = 6, .last = 6};
  const auto engine = Engine::open(model(), config);
  const RunRecord single = run(*engine, options);
  EXPECT_GT(*std::max_element(single.norms.begin(), single.norms.end()), 1.0) << "nothing clipped";
  for (const DType wire : {DType::kF32, DType::kBF16}) {
    const double bound = wire == DType::kF32 ? 1e-5 : 5e-4;  // each contribution is rounded once
    config.gradient_wire = wire;
    for (const int ranks : world_sizes()) {
      const RunRecord found = run_engine_on_gpus(ranks, model(), config, options);
      for (size_t i = 0; i < single.norms.size(); ++i) {
        EXPECT_NEAR(found.norms[i], single.norms[i], bound * single.norms[i])
            << ranks << " ranks, step " << i + 1 << ", gradients travel as " << dtype_name(wire);
        EXPECT_NEAR(found.losses[i], single.losses[i], 1e-5 * single.losses[i])
            << ranks << " ranks, step " << i + 1 << ", gradients travel as " << dtype_name(wire);
      }
    }
  }
}

void expect_bits_of_every_placement(const std::string& model, DType gradient_wire) {
  const RunOptions options{.until = 6, .last = 6};
  for (const int ranks : world_sizes()) {
    EngineConfig config = gpu_config(Precision::kBF16);
    config.gradient_wire = gradient_wire;
    config.placement.resident_blocks = 5;
    config.placement.device_optimizer_blocks = 0;
    const RunRecord expected = run_engine_on_gpus(ranks, model, config, options);
    for (const int resident : {0, 2, 5}) {
      for (const int device_optimizer : {0, 3, 5}) {
        config.placement.resident_blocks = resident;
        config.placement.device_optimizer_blocks = device_optimizer;
        config.placement.wave = 1 + resident / 2;
        EXPECT_TRUE(same_bits(expected, run_engine_on_gpus(ranks, model, config, options)))
            << ranks << " ranks, " << resident << " resident, " << device_optimizer
            << " optimizers on the device";
      }
    }
  }
}

TEST_F(GpuRanksEngine, BitsAreThoseOfEveryStageAndPlacement) {
  expect_bits_of_every_placement(model(), DType::kF32);
}

TEST_F(GpuRanksEngine, BitsOfGradientsInSixteenBitsAreThoseOfEveryStageAndPlacement) {
  expect_bits_of_every_placement(model(), DType::kBF16);
}

// What `orlop doctor --measure` finds: faster than the link to the host, slower than the memory.
TEST(GpuRanks, CollectivesAreMeasured) {
  SKIP_WITHOUT_GPUS(2);
  for (const int ranks : world_sizes()) {
    const double rate = measure_collectives("cuda", ranks);
    std::printf("%d GPUs: each receives %.0f GB/s\n", ranks, rate / 1e9);
    EXPECT_GT(rate, 5e9);
    EXPECT_LT(rate, 3e12);
  }
}

}  // namespace
}  // namespace orlop::test
