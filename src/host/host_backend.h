#pragma once

#include <cstddef>
#include <memory>

#include "backend/backend.h"

namespace orlop {

class Tracer;

struct HostBackendOptions {
  size_t device_bytes = 0;     // the whole "device": arena and workspace together never exceed it
  int threads = 1;             // of every operation; the bits do not depend on it
  bool reference_ops = false;  // plain loops in fp64: the oracle of the tests
  Tracer* tracer = nullptr;    // one lane per queue
};

// A device that is plain memory: queues are threads, copies are copies, and the byte budget is
// hard, so that swapping, prefetching and eviction happen as on a GPU.
std::unique_ptr<Backend> make_host_backend(const HostBackendOptions& options);

}  // namespace orlop
