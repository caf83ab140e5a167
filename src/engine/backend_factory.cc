#include "engine/backend_factory.h"

#include <algorithm>

#include "base/check.h"
#include "host/host_backend.h"
#include "memory/available_memory.h"

namespace orlop {
namespace {

// Of the memory that is free now, what the host plays "device" with when no budget is given.
constexpr double kHostDeviceShare = 0.4;

BackendChoice make_host(const EngineConfig& config, int threads, Tracer* tracer) {
  const size_t budget = config.limits.device_bytes.value_or(
      static_cast<size_t>(static_cast<double>(available_host_bytes()) * kHostDeviceShare));
  HostBackendOptions options;
  options.device_bytes = budget;
  options.threads = threads;
  options.reference_ops = config.reference_ops;
  options.tracer = tracer;
  return {make_host_backend(options), budget};
}

}  // namespace

BackendChoice make_backend(const EngineConfig& config, int threads, Tracer* tracer) {
  if (config.device == "host" || config.device == "auto") return make_host(config, threads, tracer);
  fail(ErrorCode::kUsage, "device '{}' is not known; use auto, host, cuda or cuda:N", config.device);
}

}  // namespace orlop
