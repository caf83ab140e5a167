#include "engine/backend_factory.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <filesystem>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "engine/cuda_library.h"
#include "gpu/cuda_backend_api.h"
#include "host/host_backend.h"
#include "memory/available_memory.h"

namespace orlop {
namespace {

// Of the memory that is free now, what the host plays "device" with when no budget is given.
constexpr double kHostDeviceShare = 0.4;
// Of a GPU's free memory, what is left to others when no budget is given.
constexpr size_t kDeviceReserveBytes = size_t{512} << 20;

constexpr const char* kDriverFile = "/dev/nvidiactl";

BackendChoice make_host(const EngineConfig& config, int local_ranks, int threads, Tracer* tracer) {
  const size_t budget = config.limits.device_bytes.value_or(static_cast<size_t>(
      static_cast<double>(available_host_bytes()) * kHostDeviceShare / local_ranks));
  HostBackendOptions options;
  options.device_bytes = budget;
  options.threads = threads;
  options.reference_ops = config.reference_ops;
  options.tracer = tracer;
  return {make_host_backend(options), budget};
}

// The CUDA part of Orlop, once loaded; stays for the life of the process.
struct CudaLibrary {
  OrlopMakeCudaBackend make = nullptr;
  OrlopCudaDeviceCount device_count = nullptr;
  OrlopMakeNcclCommunicator make_ranks = nullptr;
  std::string error;  // why it is not there
};

CudaLibrary load_cuda() {
  SharedLibrary library = load_cuda_library("liborlop_cuda.so");
  CudaLibrary cuda;
  cuda.make = library.find<OrlopMakeCudaBackend>("orlop_make_cuda_backend");
  cuda.device_count = library.find<OrlopCudaDeviceCount>("orlop_cuda_device_count");
  cuda.make_ranks = library.find<OrlopMakeNcclCommunicator>("orlop_make_nccl_communicator");
  cuda.error = library.error();
  return cuda;
}

const CudaLibrary& cuda_library() {
  static const CudaLibrary library = load_cuda();
  return library;
}

BackendChoice make_cuda(const EngineConfig& config, int index, Tracer* tracer) {
  const CudaLibrary& library = cuda_library();
  check(library.error.empty(), ErrorCode::kDevice,
        "device '{}': the CUDA part of Orlop cannot be loaded: {}; use --device host, or install a "
        "build "
        "with CUDA and an NVIDIA driver",
        config.device, library.error);
  CudaBackendOptions options;
  options.device_index = index;
  options.device_bytes = config.limits.device_bytes.value_or(0);
  options.tracer = tracer;
  BackendChoice choice;
  choice.backend.reset(library.make(&options));
  const DeviceInfo info = choice.backend->info();
  const size_t usable = info.free_bytes - std::min(info.free_bytes, kDeviceReserveBytes);
  choice.device_budget_bytes = config.limits.device_bytes.value_or(usable);
  return choice;
}

// A machine with a GPU trains on its processor only if somebody is told, once.
void warn_of_idle_gpu() {
  static std::atomic<bool> told = false;
  const std::string& error = cuda_library().error;
  if (error.empty() || !std::filesystem::exists(kDriverFile) || told.exchange(true)) return;
  log_warning(
      "device 'auto': there is an NVIDIA driver, but the CUDA part of Orlop cannot be loaded: {}; "
      "using the processor (--device host says so on purpose)",
      error);
}

int device_index(const std::string& name) {
  if (name == "cuda") return 0;
  int index = -1;
  const char* begin = name.data() + std::string("cuda:").size();
  const char* end = name.data() + name.size();
  const auto [next, error] = std::from_chars(begin, end, index);
  check(error == std::errc() && next == end && index >= 0, ErrorCode::kUsage,
        "device '{}' is not known; use auto, host, cuda or cuda:N", name);
  return index;
}

BackendDecorator& decorator() {
  static BackendDecorator decorator;
  return decorator;
}

BackendChoice choose_backend(const EngineConfig& config, int local_ranks, int threads,
                             Tracer* tracer) {
  if (config.device == "host") return make_host(config, local_ranks, threads, tracer);
  if (config.device == "auto") {
    if (usable_gpus() == 0) {
      warn_of_idle_gpu();
      return make_host(config, local_ranks, threads, tracer);
    }
    return make_cuda(config, 0, tracer);
  }
  check(config.device == "cuda" || config.device.starts_with("cuda:"), ErrorCode::kUsage,
        "device '{}' is not known; use auto, host, cuda or cuda:N", config.device);
  return make_cuda(config, device_index(config.device), tracer);
}

}  // namespace

BackendChoice make_backend(const EngineConfig& config, int local_ranks, int threads,
                           Tracer* tracer) {
  BackendChoice choice = choose_backend(config, local_ranks, threads, tracer);
  if (decorator()) choice.backend = decorator()(std::move(choice.backend));
  return choice;
}

void decorate_backends(BackendDecorator wrap) { decorator() = std::move(wrap); }

int usable_gpus() {
  const CudaLibrary& library = cuda_library();
  return library.error.empty() ? library.device_count() : 0;
}

std::shared_ptr<Communicator> make_gpu_communicator(int device_index,
                                                    std::shared_ptr<Communicator> host) {
  NcclOptions options;
  options.device_index = device_index;
  options.host = host.get();
  return {cuda_library().make_ranks(&options), [host](Communicator* ranks) { delete ranks; }};
}

}  // namespace orlop
