#include "gpu/cuda_backend.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>

#include "base/bytes.h"
#include "base/check.h"
#include "base/log.h"
#include "gpu/cuda_check.h"
#include "gpu/cuda_devices.h"
#include "gpu/device_scope.h"
#include "gpu/kernels/kernels.h"
#include "gpu/typical_rates.h"

namespace orlop {
namespace {

// Room for the machine code that the libraries load when a kernel runs for the first time, after
// the overhead has been measured.
constexpr size_t kLateCodeBytes = 64 * kMiB;

// The context and the libraries' code stay until the process ends: what the first backend of a
// device took for them is the overhead of the later ones, which find them in place. Returns the
// most that any backend of this process measured.
size_t lasting_overhead(int device, size_t measured) {
  static std::mutex mutex;
  static std::map<int, size_t> known;
  const std::lock_guard lock(mutex);
  size_t& bytes = known[device];
  bytes = std::max(bytes, measured);
  return bytes;
}

const char* queue_name(QueueKind kind) {
  switch (kind) {
    case QueueKind::kCompute:
      return "compute";
    case QueueKind::kUpload:
      return "upload";
    case QueueKind::kOffload:
      return "offload";
    case QueueKind::kComm:
      return "comm";
    case QueueKind::kSave:
      return "save";
  }
  return "?";
}

}  // namespace

CudaBackend::CudaBackend(const CudaBackendOptions& options)
    : device_(check_cuda_device(options.device_index)) {
  cudaDeviceProp properties{};
  ORLOP_CUDA(cudaGetDeviceProperties(&properties, device_));
  info_.name = properties.name;
  info_.total_bytes = properties.totalGlobalMem;
  info_.typical = typical_rates(chip_traits(device_));
  meter_ = std::make_unique<DeviceMemoryMeter>(device_);
  // Before the context is made; without NVML all memory counts as free, and what others hold then
  // counts as this backend's overhead, on the safe side.
  const size_t free_before = meter_->free_bytes().value_or(info_.total_bytes);

  const DeviceScope scope(device_);
  ORLOP_CUDA(cudaFree(nullptr));
  const char* reason = nullptr;
  check(kernels::device_has_code(&reason), ErrorCode::kDevice,
        "GPU {} ({}, compute capability {}.{}) cannot run this build: {}; build with "
        "CMAKE_CUDA_ARCHITECTURES={}{}",
        device_, info_.name, properties.major, properties.minor, reason != nullptr ? reason : "",
        properties.major, properties.minor);
  driver_ = std::make_unique<DriverApi>();
  pinned_ = std::make_unique<PinnedMemory>();
  clock_ = std::make_unique<DeviceClock>();
  make_queues(options);
  ops_ = std::make_unique<CudaOps>(
      CudaOpsOptions{.device = device_,
                     .deterministic_attention = options.deterministic_attention,
                     .autotune = options.autotune,
                     .own_kernels_only = options.own_kernels_only});
  warm_up();
  measure(options, free_before);
  log_info("GPU {}: {}, {} of {} usable, overhead {}, workspace {}, attention: {}", device_,
           info_.name, format_bytes(info_.free_bytes), format_bytes(info_.total_bytes),
           format_bytes(info_.overhead_bytes), format_bytes(info_.workspace_bytes),
           ops_->attention_description());
}

CudaBackend::~CudaBackend() {
  try {
    const DeviceScope scope(device_);
    for (auto& queue : queues_) {
      if (queue != nullptr)
        log_cuda_error(cudaStreamSynchronize(queue->stream()), "waiting for a queue");
    }
    arena_ = DeviceBuffer();
    ops_.reset();
    for (auto& queue : queues_) queue.reset();
    clock_.reset();
    pinned_.reset();
  } catch (const std::exception& error) {
    log_warning("closing GPU {}: {}", device_, error.what());
  }
}

void CudaBackend::make_queues(const CudaBackendOptions& options) {
  int lowest = 0;
  int highest = 0;
  ORLOP_CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  const QueueContext context{.device = device_,
                             .tracer = options.tracer,
                             .clock = clock_.get(),
                             .driver = driver_.get(),
                             .pinned = pinned_.get()};
  for (int i = 0; i < kQueueKinds; ++i) {
    const auto kind = static_cast<QueueKind>(i);
    // What the compute queue will wait for goes first.
    const bool compute = kind == QueueKind::kCompute;
    queues_[static_cast<size_t>(i)] =
        std::make_unique<CudaQueue>(context, queue_name(kind), compute ? lowest : highest,
                                    compute ? CublasMatmul::kWorkspaceBytes : 0);
  }
}

// One small matmul per dtype, so that what the libraries load at first use is part of the overhead.
void CudaBackend::warm_up() {
  constexpr int64_t kSide = 256;
  const DeviceBuffer buffer(3 * kSide * kSide * sizeof(float));
  CudaQueue& compute = cuda_queue(QueueKind::kCompute);
  compute.fill_zero(buffer.data(), buffer.bytes());
  auto* base = static_cast<float*>(buffer.data());
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    ops_->matmul(compute, {.a = base,
                           .b = base + kSide * kSide,
                           .c = base + 2 * kSide * kSide,
                           .m = kSide,
                           .n = kSide,
                           .k = kSide,
                           .lda = kSide,
                           .ldb = kSide,
                           .ldc = kSide,
                           .in_dtype = dtype,
                           .out_dtype = dtype});
  }
  compute.synchronize();
}

void CudaBackend::measure(const CudaBackendOptions& options, size_t free_before) {
  for (const auto& queue : queues_) info_.workspace_bytes += queue->workspace_bytes();
  const size_t free_now = free_bytes_now();
  const size_t taken = free_before > free_now ? free_before - free_now : 0;
  const size_t measured = taken > info_.workspace_bytes ? taken - info_.workspace_bytes : 0;
  const size_t overhead = lasting_overhead(device_, measured);
  info_.overhead_bytes = overhead + kLateCodeBytes;
  const size_t free = free_before + (overhead - measured);
  info_.free_bytes = options.device_bytes > 0 ? std::min(options.device_bytes, free) : free;
  const size_t fixed = info_.overhead_bytes + info_.workspace_bytes;
  check(info_.free_bytes > fixed, ErrorCode::kDoesNotFit,
        "GPU {}: the budget of {} is below the {} that context, libraries ({}) and workspace ({}) "
        "take",
        device_, format_bytes(info_.free_bytes), format_bytes(fixed),
        format_bytes(info_.overhead_bytes), format_bytes(info_.workspace_bytes));
}

size_t CudaBackend::free_bytes_now() const {
  if (const auto bytes = meter_->free_bytes()) return *bytes;
  const DeviceScope scope(device_);
  size_t free = 0;
  size_t total = 0;
  ORLOP_CUDA(cudaMemGetInfo(&free, &total));
  return free;
}

std::unique_ptr<Event> CudaBackend::make_event() {
  const DeviceScope scope(device_);
  return std::make_unique<CudaEvent>(device_);
}

void* CudaBackend::allocate_arena(size_t bytes) {
  check(arena_.data() == nullptr, ErrorCode::kUsage, "GPU {}: the arena was taken before ({})",
        device_, format_bytes(arena_.bytes()));
  const size_t room = info_.free_bytes - info_.overhead_bytes - info_.workspace_bytes;
  check(bytes <= room, ErrorCode::kDoesNotFit,
        "GPU {}: an arena of {} does not fit: {} are left of the budget of {} after {} of overhead "
        "and workspace. Raise the device budget or let more states live in host memory",
        device_, format_bytes(bytes), format_bytes(room), format_bytes(info_.free_bytes),
        format_bytes(info_.overhead_bytes + info_.workspace_bytes));
  const DeviceScope scope(device_);
  try {
    arena_ = DeviceBuffer(bytes);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kOutOfMemory) throw;
    fail(ErrorCode::kDoesNotFit,
         "GPU {}: an arena of {} does not fit: {} are free now of {}; another process may have "
         "taken "
         "memory since the plan was made",
         device_, format_bytes(bytes), format_bytes(free_bytes_now()),
         format_bytes(info_.total_bytes));
  }
  return arena_.data();
}

void CudaBackend::register_host_memory(void* address, size_t bytes) {
  const DeviceScope scope(device_);
  pinned_->add(address, bytes);
}

void CudaBackend::synchronize() {
  for (auto& queue : queues_) queue->synchronize();
}

}  // namespace orlop
