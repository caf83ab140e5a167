#pragma once

#include <functional>
#include <memory>

#include "backend/backend.h"
#include "base/trace.h"
#include "comm/communicator.h"
#include "orlop/config.h"

namespace orlop {

// What make_backend() hands out: the backend may live in a library of its own, which stays loaded.
struct BackendChoice {
  std::unique_ptr<Backend> backend;
  size_t device_budget_bytes = 0;
};

// The backend that config.device names: "host", "cuda", "cuda:N", or "auto": the first GPU if there
// is one that works, else the host. `local_ranks` share the host's memory. Throws Error(kUsage) for
// any other name, Error(kDevice) when a GPU was asked for and cannot be used, with the reason.
BackendChoice make_backend(const EngineConfig& config, int local_ranks, int threads,
                           Tracer* tracer);

// Wraps every backend that make_backend() makes from now on; null ends that. Not while one is being
// made. With it tests put delays below a whole engine.
using BackendDecorator = std::function<std::unique_ptr<Backend>(std::unique_ptr<Backend> backend)>;
void decorate_backends(BackendDecorator decorator);

// GPUs that a backend can be made for; 0 where the CUDA part of Orlop cannot be loaded.
int usable_gpus();

// The ranks of `host` with one GPU each; all make theirs together. Throws Error(kCommunicator).
std::shared_ptr<Communicator> make_gpu_communicator(int device_index,
                                                    std::shared_ptr<Communicator> host);

}  // namespace orlop
