#pragma once

#include <cstddef>
#include <memory>

#include "backend/ops.h"
#include "host/kernels.h"

namespace orlop::host {

// How a host executes MatmulArgs; run() is called by one thread at a time and returns when c is
// there.
class Matmul {
 public:
  virtual ~Matmul() = default;
  virtual void run(const MatmulArgs& args) = 0;
};

// Fixed memory of a strategy, the same for every shape; aligned to a page.
struct Workspace {
  void* data = nullptr;
  size_t bytes = 0;
};

// Three plain loops in fp64: the oracle.
std::unique_ptr<Matmul> make_reference_matmul(int threads);

// Cache-blocked loops over the block product of `kernels`: for machines without oneDNN.
std::unique_ptr<Matmul> make_blocked_matmul(const KernelSet& kernels, int threads);

// oneDNN; only in builds that have it.
std::unique_ptr<Matmul> make_onednn_matmul(const KernelSet& kernels, int threads,
                                           Workspace workspace);
size_t onednn_matmul_workspace_bytes(int threads);

const Kernels& kernels_of(const KernelSet& set, DType dtype);

}  // namespace orlop::host
