#include "cpu_adam/grad_sum.h"

#include <algorithm>

#include "base/bytes.h"
#include "base/check.h"
#include "cpu_adam/fp_environment.h"
#include "cpu_adam/grad_norm.h"
#include "cpu_adam/kernel_table.h"
#include "cpu_adam/thread_share.h"

namespace orlop {

SquareSum sum_gradient(const GradSum& work, double* scratch, int threads) {
  const GradFormat format = grad_format(work.dtype);
  check(work.numel >= 0 && threads >= 1, ErrorCode::kUsage,
        "sum_gradient: numel = {}, threads = {}", work.numel, threads);
  if (work.numel == 0) return {};
  check(work.grad != nullptr && work.sum != nullptr && (scratch != nullptr || !work.round),
        ErrorCode::kUsage, "sum_gradient: grad, sum or scratch is null for {} elements",
        work.numel);

  const CpuKernels& kernels = active_kernels();
  const AccumulateKernel accumulate = work.start == SumStart::kStart ? kernels.start_sum[format]
                                      : work.start == SumStart::kAdd ? kernels.add_to_sum[format]
                                                                     : nullptr;
  const int64_t chunks = ceil_div(work.numel, kNormChunk);
  const auto element_bytes = static_cast<int64_t>(dtype_bytes(work.dtype));
  share_between_threads(chunks, threads, [&](int64_t first, int64_t last) {
    const FpEnvironment environment;
    for (int64_t chunk = first; chunk < last; ++chunk) {
      const int64_t begin = chunk * kNormChunk;
      const int64_t count = std::min(kNormChunk, work.numel - begin);
      auto* const grad = static_cast<unsigned char*>(work.grad) + begin * element_bytes;
      float* const sum = work.sum + begin;
      if (accumulate) accumulate(grad, sum, count);
      if (!work.round) continue;
      kernels.round_sum[format](sum, grad, count);
      scratch[chunk] = kernels.square_sum[format](grad, count);
    }
  });
  return work.round ? fold_square_sum(work.grad, format, work.numel, scratch) : SquareSum{};
}

}  // namespace orlop
