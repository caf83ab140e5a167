#include "cpu_adam/grad_norm.h"

#include <algorithm>
#include <cmath>

#include "base/bytes.h"
#include "base/check.h"
#include "base/half.h"
#include "cpu_adam/fp_environment.h"
#include "cpu_adam/kernel_table.h"
#include "cpu_adam/thread_share.h"

namespace orlop {
namespace {

float grad_at(const void* grad, GradFormat format, int64_t i) {
  switch (format) {
    case kGradBf16:
      return bf16_to_float(static_cast<const uint16_t*>(grad)[i]);
    case kGradF16:
      return fp16_to_float(static_cast<const uint16_t*>(grad)[i]);
    default:
      return static_cast<const float*>(grad)[i];
  }
}

// A chunk's sum is finite exactly when its elements are, so only the first chunk that is not is
// searched.
int64_t find_nonfinite(const void* grad, GradFormat format, int64_t numel, const double* sums) {
  const int64_t chunks = ceil_div(numel, kNormChunk);
  const double* bad = std::find_if(sums, sums + chunks, [](double s) { return !std::isfinite(s); });
  if (bad == sums + chunks) return -1;
  int64_t i = (bad - sums) * kNormChunk;
  while (std::isfinite(grad_at(grad, format, i))) ++i;
  return i;
}

}  // namespace

double fold_chunk_sums(double* sums, int64_t count) {
  if (count == 0) return 0;
  while (count > 1) {
    const int64_t pairs = count / 2;
    for (int64_t i = 0; i < pairs; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
    if (count % 2 == 1) sums[pairs] = sums[count - 1];
    count = pairs + count % 2;
  }
  return sums[0];
}

SquareSum fold_square_sum(const void* grad, GradFormat format, int64_t numel, double* sums) {
  const FpEnvironment environment;
  SquareSum result;
  result.first_nonfinite = find_nonfinite(grad, format, numel, sums);
  result.sum = fold_chunk_sums(sums, ceil_div(numel, kNormChunk));
  return result;
}

SquareSum grad_square_sum(const void* grad, DType dtype, int64_t numel, double* scratch,
                          int threads) {
  const GradFormat format = grad_format(dtype);
  check(numel >= 0, ErrorCode::kUsage, "grad_square_sum: numel = {} is negative", numel);
  check(threads >= 1, ErrorCode::kUsage, "grad_square_sum: threads = {}, at least 1 is needed",
        threads);
  if (numel == 0) return {};
  check(grad != nullptr && scratch != nullptr, ErrorCode::kUsage,
        "grad_square_sum: {} is null for {} elements", grad == nullptr ? "grad" : "scratch", numel);

  const SquareSumKernel kernel = active_kernels().square_sum[format];
  const int64_t chunks = ceil_div(numel, kNormChunk);
  const auto* bytes = static_cast<const unsigned char*>(grad);
  const auto chunk_bytes = kNormChunk * static_cast<int64_t>(dtype_bytes(dtype));
  share_between_threads(chunks, threads, [&](int64_t begin, int64_t end) {
    const FpEnvironment environment;
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      scratch[chunk] =
          kernel(bytes + chunk * chunk_bytes, std::min(kNormChunk, numel - chunk * kNormChunk));
    }
  });
  return fold_square_sum(grad, format, numel, scratch);
}

}  // namespace orlop
