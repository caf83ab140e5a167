// Queues, events, gates, pinned memory, budgets, errors and the trace on a GPU.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "base/trace.h"
#include "gpu_environment.h"
#include "orlop/error.h"
#include "pinned_host.h"

namespace orlop::test {
namespace {

using testing::HasSubstr;
using namespace std::chrono_literals;

auto* const environment =
    static_cast<GpuEnvironment*>(testing::AddGlobalTestEnvironment(new GpuEnvironment(3 * kGiB)));

template <typename Work>
std::string error_of(Work&& work) {
  try {
    work();
    return "none";
  } catch (const Error& error) {
    return std::to_string(static_cast<int>(error.code())) + ": " + error.what();
  }
}

std::string code(ErrorCode code) { return std::to_string(static_cast<int>(code)) + ": "; }

class GpuBackend : public testing::Test {
 protected:
  void SetUp() override { SKIP_WITHOUT_GPU(); }

  CudaBackend& backend() { return *gpu().backend(); }
  Queue& compute() { return backend().queue(QueueKind::kCompute); }
  Queue& upload() { return backend().queue(QueueKind::kUpload); }
  Queue& offload() { return backend().queue(QueueKind::kOffload); }
};

// A registered page with one gate. Registrations live as long as the backend, so the page does too.
Gate make_gate() {
  static auto* const pages = new std::vector<std::unique_ptr<PageBuffer>>;
  pages->push_back(std::make_unique<PageBuffer>(4096));
  gpu().backend()->register_host_memory(pages->back()->as(), 4096);
  return {pages->back()->as<std::atomic<uint32_t>>()};
}

double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

TEST_F(GpuBackend, CopiesThereAndBack) {
  std::vector<uint32_t> values(1000003);
  std::iota(values.begin(), values.end(), 7u);
  std::vector<uint32_t> back(values.size());
  const size_t bytes = values.size() * sizeof(uint32_t);
  std::byte* first = gpu().arena();
  std::byte* second = first + align_up(bytes, kDeviceAlignment);
  Queue& queue = compute();
  queue.upload(first, values.data(), bytes);
  queue.fill_zero(second, bytes);
  queue.copy_on_device(second + 4, first, bytes - 4);
  queue.offload(back.data(), second, bytes);
  queue.synchronize();
  EXPECT_EQ(back[0], 0u);
  for (size_t i = 1; i < values.size(); ++i) ASSERT_EQ(back[i], values[i - 1]) << i;
  queue.upload(first, values.data(), 0);
  queue.synchronize();
}

TEST_F(GpuBackend, ArenaIsAligned) {
  EXPECT_EQ(reinterpret_cast<uintptr_t>(gpu().arena()) % kDeviceAlignment, 0u);
}

TEST_F(GpuBackend, GateHoldsTheQueueUntilItsVersion) {
  const Gate gate = make_gate();
  const auto event = backend().make_event();
  EXPECT_TRUE(event->query());  // never recorded
  upload().wait_gate(gate, 3);
  upload().record(*event);
  gate.value->store(2);
  std::this_thread::sleep_for(20ms);
  EXPECT_FALSE(event->query());
  std::thread optimizer([&] {
    std::this_thread::sleep_for(20ms);
    gate.value->store(3);
  });
  event->synchronize();
  optimizer.join();
  EXPECT_TRUE(event->query());
  upload().wait_gate(gate, 1);  // already past
  upload().synchronize();
}

TEST_F(GpuBackend, FailedGateOpensEveryWait) {
  const Gate gate = make_gate();
  upload().wait_gate(gate, 1000000);
  gate.value->store(Gate::kFailed);
  upload().synchronize();
}

TEST_F(GpuBackend, GateOutsideRegisteredMemoryIsRefused) {
  std::atomic<uint32_t> value{0};
  EXPECT_THAT(error_of([&] { upload().wait_gate({&value}, 1); }),
              HasSubstr(code(ErrorCode::kUsage) + "queue 'upload': the gate"));
  upload().synchronize();
}

TEST_F(GpuBackend, WaitIsForThePointRecordedBefore) {
  const Gate gate = make_gate();
  const auto point = backend().make_event();
  const auto done = backend().make_event();
  compute().wait_gate(gate, 1);
  compute().record(*point);
  upload().wait(*point);
  offload().record(*point);  // moves the event to a queue that has nothing to wait for
  upload().record(*done);
  offload().synchronize();
  std::this_thread::sleep_for(20ms);
  EXPECT_FALSE(done->query()) << "the wait followed the event to its new place";
  gate.value->store(1);
  done->synchronize();
  compute().synchronize();
}

// A range that was registered in several calls is copied in pieces; the result must not show it.
TEST_F(GpuBackend, CopiesCrossTheSeamsOfRegisteredMemory) {
  static auto* const buffer = new PageBuffer(64 * kMiB);
  auto* words = buffer->as<uint32_t>();
  const size_t count = buffer->bytes() / sizeof(uint32_t);
  for (size_t i = 0; i < count; ++i) words[i] = static_cast<uint32_t>(i * 2654435761u);
  // A gap of one page stays unregistered.
  backend().register_host_memory(buffer->as(), 16 * kMiB);
  backend().register_host_memory(buffer->as() + 16 * kMiB, 20 * kMiB);
  backend().register_host_memory(buffer->as() + 36 * kMiB + 4096, 28 * kMiB - 4096);
  std::vector<uint32_t> back(count);
  upload().upload(gpu().arena(), words + 1, buffer->bytes() - 8);
  upload().offload(back.data(), gpu().arena(), buffer->bytes() - 8);
  upload().synchronize();
  for (size_t i = 0; i + 2 < count; ++i) ASSERT_EQ(back[i], words[i + 1]) << i;
}

TEST_F(GpuBackend, RegistrationThatIsRefusedNamesAmountsAndLeavesNothing) {
  static auto* const buffer = new PageBuffer(2 * kMiB);
  backend().register_host_memory(buffer->as(), 1 * kMiB);
  // The range reaches into memory that is registered already.
  const std::string error =
      error_of([&] { backend().register_host_memory(buffer->as(), 2 * kMiB); });
  EXPECT_THAT(error, HasSubstr(code(ErrorCode::kOutOfMemory)));
  EXPECT_THAT(error, HasSubstr(format_bytes(2 * kMiB) + " asked for"));
  EXPECT_THAT(error, HasSubstr("pinned before"));
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess) << "the next call would report it";
  backend().register_host_memory(buffer->as() + 1 * kMiB, 1 * kMiB);
  EXPECT_THAT(error_of([&] { backend().register_host_memory(buffer->as() + 1, 4096); }),
              HasSubstr(code(ErrorCode::kUsage)));
}

TEST_F(GpuBackend, ArenaIsBoundedByTheBudget) {
  const DeviceInfo shared = backend().info();
  const size_t budget = shared.overhead_bytes + shared.workspace_bytes + 256 * kMiB;
  CudaBackend small({.device_bytes = budget});
  const DeviceInfo info = small.info();
  EXPECT_EQ(info.free_bytes, budget);
  const size_t room = budget - info.overhead_bytes - info.workspace_bytes;
  const std::string error = error_of([&] { small.allocate_arena(room + 1); });
  EXPECT_THAT(error, HasSubstr(code(ErrorCode::kDoesNotFit)));
  EXPECT_THAT(error, HasSubstr(format_bytes(budget)));
  EXPECT_NE(small.allocate_arena(room), nullptr);
  EXPECT_THAT(error_of([&] { small.allocate_arena(1); }), HasSubstr(code(ErrorCode::kUsage)));
}

TEST_F(GpuBackend, ArenaLargerThanTheDeviceIsRefusedWithBothNumbers) {
  CudaBackend other({});
  const DeviceInfo info = other.info();
  const std::string error = error_of([&] { other.allocate_arena(info.total_bytes); });
  EXPECT_THAT(error, HasSubstr(code(ErrorCode::kDoesNotFit)));
  EXPECT_THAT(error, HasSubstr(format_bytes(info.total_bytes)));
}

TEST_F(GpuBackend, ARefusedCallIsReportedOnceAndTheQueueGoesOn) {
  std::vector<std::byte> host(64);
  const std::string error = error_of(
      [&] { upload().upload(reinterpret_cast<void*>(uintptr_t{16}), host.data(), host.size()); });
  EXPECT_THAT(error, HasSubstr(code(ErrorCode::kDevice)));
  EXPECT_THAT(error, HasSubstr("cudaMemcpyAsync"));
  EXPECT_THAT(error, HasSubstr("cuda_queue.cc"));
  EXPECT_THAT(error, HasSubstr("cudaErrorInvalidValue"));
  upload().upload(gpu().arena(), host.data(), host.size());
  upload().synchronize();
}

TEST_F(GpuBackend, OperationsRefuseWhatTheyCannotDo) {
  Ops& ops = backend().ops();
  MatmulArgs half_sum{.m = 8, .n = 8, .k = 8, .accumulate = true};
  half_sum.in_dtype = half_sum.out_dtype = DType::kBF16;
  EXPECT_THAT(error_of([&] { ops.matmul(compute(), half_sum); }), HasSubstr("8x8x8"));
  MatmulArgs wrong_queue{.a = gpu().arena(), .b = gpu().arena(), .c = gpu().arena() + 4096};
  wrong_queue.m = wrong_queue.n = wrong_queue.k = 8;
  wrong_queue.lda = wrong_queue.ldb = wrong_queue.ldc = 8;
  EXPECT_THAT(error_of([&] { ops.matmul(upload(), wrong_queue); }),
              HasSubstr("matmul on queue 'upload' needs"));
  EXPECT_THAT(error_of([&] { ops.add(compute(), gpu().arena(), gpu().arena(), 1, DType::kI32); }),
              HasSubstr("I32"));
}

using GpuBackendDeathTest = GpuBackend;

TEST_F(GpuBackendDeathTest, AFailedKernelNamesTheErrorAndEndsTheContext) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        auto* nowhere = reinterpret_cast<void*>(uintptr_t{1} << 20);
        backend().ops().add(compute(), nowhere, nowhere, 4096, DType::kF32);
        std::fputs(error_of([&] { compute().synchronize(); }).c_str(), stderr);
        std::_Exit(0);
      },
      testing::ExitedWithCode(0), "cudaErrorIllegalAddress.*the device context is lost");
}

// Both copy directions and compute at the same time take clearly less than one after the other.
TEST_F(GpuBackend, CopiesOverlapComputeAndEachOther) {
  constexpr size_t kBytes = 512 * kMiB;
  static auto* const host = new PageBuffer(2 * kBytes);
  std::memset(host->as(), 1, host->bytes());
  backend().register_host_memory(host->as(), host->bytes());
  std::byte* arena = gpu().arena();
  const auto issue_upload = [&] { upload().upload(arena, host->as(), kBytes); };
  const auto issue_offload = [&] {
    offload().offload(host->as() + kBytes, arena + kBytes, kBytes);
  };
  constexpr int64_t kSide = 8192;
  MatmulArgs matmul{.m = kSide, .n = kSide, .k = kSide, .lda = kSide, .ldb = kSide, .ldc = kSide};
  matmul.in_dtype = matmul.out_dtype = DType::kBF16;
  matmul.a = arena + 2 * kBytes;
  matmul.b = arena + 2 * kBytes + 128 * kMiB;
  matmul.c = arena + 2 * kBytes + 256 * kMiB;
  compute().fill_zero(arena, gpu().arena_bytes());
  const auto issue_compute = [&] {
    for (int i = 0; i < 8; ++i) backend().ops().matmul(compute(), matmul);
  };
  const auto time = [&](const std::function<void()>& issue) {
    issue();
    backend().synchronize();
    return seconds_of([&] {
      issue();
      backend().synchronize();
    });
  };
  const double up = time(issue_upload);
  const double down = time(issue_offload);
  const double math = time(issue_compute);
  const double all = time([&] {
    issue_upload();
    issue_compute();
    issue_offload();
  });
  const double gb = static_cast<double>(kBytes) / 1e9;
  std::printf("upload %.1f GB/s, offload %.1f GB/s, compute %.2f ms, together %.2f of the sum\n",
              gb / up, gb / down, math * 1e3, all / (up + down + math));
  EXPECT_LT(all, 0.75 * (up + down + math));
}

TEST_F(GpuBackend, TraceHoldsTheDevicesOwnTimes) {
  Tracer tracer;
  const std::string path = testing::TempDir() + "gpu_trace.json";
  {
    CudaBackend traced({.tracer = &tracer});
    auto* arena = static_cast<std::byte*>(traced.allocate_arena(256 * kMiB));
    std::vector<std::byte> host(8 * kMiB);
    Queue& queue = traced.queue(QueueKind::kUpload);
    queue.upload(arena, host.data(), host.size());  // the tracer is off
    queue.synchronize();
    tracer.start();
    for (int i = 0; i < 3; ++i) queue.upload(arena, host.data(), host.size());
    queue.synchronize();
    traced.ops().add(traced.queue(QueueKind::kCompute), arena, arena + 128 * kMiB, 32 * kMiB,
                     DType::kBF16);
    traced.synchronize();
    tracer.stop();
  }
  tracer.write(path);
  std::ifstream file(path);
  const auto trace = nlohmann::json::parse(file);
  std::map<int, std::string> lanes;
  std::map<std::string, int> spans;
  double last_end = 0;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] == "M") {
      lanes[event["tid"]] = event["args"]["name"];
      continue;
    }
    const std::string key = lanes[event["tid"]] + "/" + event["name"].get<std::string>();
    ++spans[key];
    EXPECT_GT(event["dur"].get<double>(), 0.0) << key;
    EXPECT_GE(event["ts"].get<double>(), -100.0) << key;
    EXPECT_LT(event["ts"].get<double>(), 60e6) << key;
    if (key == "gpu upload/upload") {
      EXPECT_GE(event["ts"].get<double>() + 1.0, last_end) << "spans of one queue overlap";
      last_end = event["ts"].get<double>() + event["dur"].get<double>();
    }
  }
  EXPECT_EQ(spans["gpu upload/upload"], 3);
  EXPECT_EQ(spans["gpu compute/add"], 1);
}

}  // namespace

GpuEnvironment& gpu() { return *environment; }

}  // namespace orlop::test
