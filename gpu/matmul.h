#pragma once

#include <cublasLt.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "backend/ops.h"
#include "gpu/cuda_queue.h"

namespace orlop {

// Matmuls of one device through cuBLASLt. The algorithm of a shape is chosen once, among cuBLASLt's
// first heuristics, from the shape, the layouts, the dtypes and the alignment of the pointers
// alone, under one fixed workspace; so the bits do not depend on budgets. What cuBLASLt does not
// have is computed by a plain kernel.
class CublasMatmul {
 public:
  // The workspace of every matmul, in every plan.
  static constexpr size_t kWorkspaceBytes = size_t{32} << 20;
  static constexpr int kCandidates = 8;

  // `autotune`: at a shape's first call, time the first kCandidates heuristics on its operands and
  // keep the fastest for the life of the process; not where c is accumulated into. Faster at times,
  // but two runs may then choose differently and differ in their last bits.
  CublasMatmul(int device, bool autotune);
  ~CublasMatmul();

  void run(CudaQueue& queue, const MatmulArgs& args);

  // Times (ms per call, median) the candidates of args' shape, the one that run() uses first; c is
  // overwritten. For measurements only.
  std::vector<float> time_candidates(CudaQueue& queue, const MatmulArgs& args);

 private:
  struct Key {
    int64_t m, n, k, lda, ldb, ldc;
    uint32_t flags;  // dtypes, transpositions, bias, accumulate and alignments

    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    size_t operator()(const Key& key) const;
  };
  struct Plan;

  static Key make_key(const MatmulArgs& args);
  const Plan& plan_for(CudaQueue& queue, const MatmulArgs& args);
  std::unique_ptr<Plan> make_plan(const MatmulArgs& args) const;
  void launch(CudaQueue& queue, const Plan& plan, const cublasLtMatmulAlgo_t& algorithm,
              const MatmulArgs& args) const;
  std::vector<float> time_plan(CudaQueue& queue, const Plan& plan, const MatmulArgs& args) const;

  cublasLtHandle_t handle_ = nullptr;
  int multiprocessors_ = 0;  // 0: the heuristic's first is taken
  bool autotune_;
  std::mutex mutex_;  // guards plans_, also while one is launched: the bias pointer is set in it
  std::unordered_map<Key, std::unique_ptr<Plan>, KeyHash> plans_;
};

}  // namespace orlop
