#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "base/check.h"
#include "cpu_adam/adam.h"
#include "cpu_adam/cpu_features.h"
#include "engine/backend_factory.h"
#include "engine/measure_collectives.h"
#include "memory/available_memory.h"
#include "memory/host_arena.h"
#include "nvme/aio_sweep.h"
#include "orlop/hardware.h"
#include "zero/hardware_profile.h"
#include "zero/param_states.h"

namespace orlop {
namespace {

constexpr double kSecondsPerFigure = 1.0;
constexpr int kFewestRuns = 3;
constexpr size_t kDeviceBytes = size_t{1} << 30;
constexpr size_t kHostDeviceBytes = size_t{256} << 20;
constexpr int64_t kAdamElements = int64_t{1} << 25;
constexpr int kSmallOperations = 200;

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Median seconds of `work`, which ends when its work has run; the first run does not count.
template <typename Work>
double median_seconds(const Work& work) {
  work();
  std::vector<double> runs;
  const auto begin = std::chrono::steady_clock::now();
  while (static_cast<int>(runs.size()) < kFewestRuns || seconds_since(begin) < kSecondsPerFigure) {
    const auto start = std::chrono::steady_clock::now();
    work();
    runs.push_back(seconds_since(start));
  }
  std::nth_element(runs.begin(), runs.begin() + static_cast<std::ptrdiff_t>(runs.size() / 2),
                   runs.end());
  return runs[runs.size() / 2];
}

// Numbers in [0.5, 1) of any of the float types: zeros would cost less power, and run faster.
void fill_random(std::span<std::byte> bytes, DType dtype) {
  std::mt19937 random(1);
  if (dtype == DType::kF32) {
    for (size_t i = 0; i + 4 <= bytes.size(); i += 4) {
      const uint32_t value = 0x3f000000u | (static_cast<uint32_t>(random()) & 0x7fffffu);
      std::memcpy(&bytes[i], &value, sizeof value);
    }
    return;
  }
  const uint32_t exponent = dtype == DType::kBF16 ? 0x3f00u : 0x3800u;
  const uint32_t mantissa = dtype == DType::kBF16 ? 0x7fu : 0x3ffu;
  for (size_t i = 0; i + 2 <= bytes.size(); i += 2) {
    const auto value = static_cast<uint16_t>(exponent | (random() & mantissa));
    std::memcpy(&bytes[i], &value, sizeof value);
  }
}

// One device and a piece of host memory that it knows.
class Bench {
 public:
  explicit Bench(const MeasureConfig& config)
      : threads_(config.threads > 0 ? config.threads : default_threads()),
        host_(std::min(static_cast<size_t>(kAdamElements) * kAdamBytes,
                       align_up(available_host_bytes() / 4, kPageBytes))) {
    EngineConfig engine;
    engine.device = config.device;
    choice_ = make_backend(engine, 1, threads_, nullptr);
    const DeviceInfo info = choice_.backend->info();
    is_host_ = info.is_host;
    // What plans leave to the host: see make_planning().
    if (!is_host_ && config.threads == 0) threads_ = std::max(1, threads_ - 1);
    device_bytes_ = std::min(is_host_ ? kHostDeviceBytes : kDeviceBytes, info.free_bytes / 2) /
                    kPageBytes * kPageBytes;
    device_ = static_cast<std::byte*>(choice_.backend->allocate_arena(device_bytes_));
    if (!is_host_) {
      host_.register_with([this](void* address, size_t bytes) {
        choice_.backend->register_host_memory(address, bytes);
      });
    }
  }

  HardwareProfile measure() {
    HardwareProfile profile = default_profile(choice_.backend->info(), threads_);
    profile.is_measured = true;
    const size_t bytes = std::min(device_bytes_ / 2, host_.capacity_bytes());
    Queue& up = queue(QueueKind::kUpload);
    Queue& down = queue(QueueKind::kOffload);
    Queue& compute = queue(QueueKind::kCompute);
    const auto rate = [&](Queue& on, double moved, const auto& issue) {
      return moved / median_seconds([&] {
               issue();
               on.synchronize();
             });
    };
    const auto size = static_cast<double>(bytes);
    profile.upload_bytes_per_s = rate(up, size, [&] { up.upload(device_, host_.data(), bytes); });
    profile.offload_bytes_per_s =
        rate(down, size, [&] { down.offload(host_.data(), device_, bytes); });
    profile.device_bytes_per_s =
        rate(compute, 2 * size, [&] { compute.copy_on_device(device_ + bytes, device_, bytes); });
    const auto many = [&] {
      for (int i = 0; i < kSmallOperations; ++i) compute.fill_zero(device_, kDeviceAlignment);
    };
    profile.launch_seconds =
        kSmallOperations / rate(compute, kSmallOperations * 1.0, many) / kSmallOperations;
    for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      profile.matmul_rates.of(dtype) = matmul_rate(dtype);
    }
    profile.matmul_flop_per_s = profile.matmul_rates.of(DType::kBF16);
    profile.host_bytes_per_s = adam_rate();
    return profile;
  }

 private:
  // Of states and gradient, bf16 compute with fp32 moments.
  static constexpr size_t kAdamBytes = 14;

  Queue& queue(QueueKind kind) { return choice_.backend->queue(kind); }

  // C = A B of the largest power of two that fits: three matrices, fp32 results.
  double matmul_rate(DType dtype) {
    const size_t element = dtype_bytes(dtype);
    int64_t side = 256;
    const auto needs = [&](int64_t n) {
      return static_cast<size_t>(n * n) * (2 * element + sizeof(float));
    };
    const int64_t largest = is_host_ ? 1024 : 8192;
    while (2 * side <= largest && needs(2 * side) <= device_bytes_) side *= 2;
    const size_t matrix = static_cast<size_t>(side * side) * element;
    check(matrix <= host_.capacity_bytes() && needs(side) <= device_bytes_, ErrorCode::kDoesNotFit,
          "measuring matmuls needs {} of device memory, {} are free", format_bytes(needs(side)),
          format_bytes(device_bytes_));
    fill_random({host_.data(), matrix}, dtype);
    for (const size_t offset : {size_t{0}, matrix})
      queue(QueueKind::kUpload).upload(device_ + offset, host_.data(), matrix);
    queue(QueueKind::kUpload).synchronize();
    MatmulArgs args;
    args.a = device_;
    args.b = device_ + matrix;
    args.c = device_ + 2 * matrix;
    args.m = args.n = args.k = args.lda = args.ldb = args.ldc = side;
    args.trans_b = true;
    args.in_dtype = dtype;
    args.out_dtype = DType::kF32;
    Queue& compute = queue(QueueKind::kCompute);
    const double seconds = median_seconds([&] {
      choice_.backend->ops().matmul(compute, args);
      compute.synchronize();
    });
    const auto n = static_cast<double>(side);
    return 2 * n * n * n / seconds;
  }

  // Bytes that an update reads and writes, as simulate() counts them, per second.
  double adam_rate() {
    const auto numel =
        std::min(kAdamElements, static_cast<int64_t>(host_.capacity_bytes() / kAdamBytes));
    const StatePlanes planes = state_planes(numel, DType::kBF16, DType::kF32);
    std::byte* base = host_.data();
    std::memset(base, 0, planes.bytes());
    const std::span<std::byte> grad(base + planes.bytes(),
                                    static_cast<size_t>(numel) * sizeof(uint16_t));
    fill_random(grad, DType::kBF16);
    AdamShard shard;
    shard.param = base;
    std::byte* const rest = state_address(planes, base).rest;
    shard.lo = reinterpret_cast<uint16_t*>(rest + planes.master);
    shard.exp_avg = rest + planes.exp_avg;
    shard.exp_avg_sq = rest + planes.exp_avg_sq;
    shard.grad = grad.data();
    shard.numel = numel;
    const double seconds = median_seconds([&] { adam_step(shard, {}, 1.0f, threads_); });
    return static_cast<double>(2 * planes.bytes() + grad.size()) / seconds;
  }

  int threads_;
  HostArena host_;  // outlives the backend, which has it registered
  BackendChoice choice_;
  bool is_host_ = false;
  std::byte* device_ = nullptr;
  size_t device_bytes_ = 0;
};

}  // namespace

MeasuredHardware measure_hardware(const MeasureConfig& config) {
  check(config.threads >= 0, ErrorCode::kUsage, "threads is {}; it must be at least 0",
        config.threads);
  SweepOptions sweep;
  sweep.directory = config.drive;
  sweep.block_bytes = {size_t{1} << 20};
  sweep.depths = {32};
  SweepPoint drive;
  if (!config.drive.empty()) drive = sweep_aio(sweep).best;
  HardwareProfile profile = Bench(config).measure();
  const bool any_gpu = config.device == "auto" || config.device == "cuda";
  if (const int gpus = any_gpu ? usable_gpus() : 0; gpus > 1) {
    profile.collective_bytes_per_s = measure_collectives("cuda", gpus);
    profile.collective_is_measured = true;
  }
  if (!config.drive.empty()) {
    constexpr double kGib = 1 << 30;
    profile.nvme_read_bytes_per_s = drive.read_gib_per_s * kGib;
    profile.nvme_write_bytes_per_s = drive.write_gib_per_s * kGib;
    profile.drive_is_measured = true;
  }
  return {profile.to_json(), save_profile(profile)};
}

}  // namespace orlop
