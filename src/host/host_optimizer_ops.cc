#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/bytes.h"
#include "cpu_adam/adam.h"
#include "cpu_adam/grad_norm.h"
#include "host/element_types.h"
#include "host/host_ops.h"
#include "host/host_queue.h"
#include "host/parallel.h"

namespace orlop::host {
namespace {

constexpr int64_t kRoundGrain = 65536;

StepScalars step_scalars(const FinishNormArgs& args) {
  StepScalars result;
  double square_sum = 0;
  for (int64_t p = 0; p < args.params; ++p) {
    for (int64_t rank = 0; rank < args.ranks; ++rank) {
      const int64_t at = rank * args.rank_stride + p;
      square_sum += args.square_sums[at];
      if (args.first_nonfinite[at] >= 0 && !result.skip) {
        result.skip = 1;
        result.nonfinite_param = p;
        result.nonfinite_index = args.first_nonfinite[at];
        result.nonfinite_rank = rank;
      }
    }
  }
  const auto loss_scale = static_cast<double>(args.loss_scale);
  result.grad_norm = std::sqrt(square_sum) / loss_scale;
  double clip = 1.0;
  if (args.max_norm > 0) {
    clip = std::min(1.0, static_cast<double>(args.max_norm) / (result.grad_norm + 1e-6));
  }
  result.grad_scale = static_cast<float>(clip / loss_scale);
  return result;
}

}  // namespace

size_t HostOps::grad_norm_scratch_bytes(int64_t numel) const {
  return static_cast<size_t>(ceil_div(numel, kNormChunk)) * sizeof(double);
}

void HostOps::round_grad(Queue& queue, const RoundGradArgs& args) {
  host_queue(queue).enqueue("round_grad", [this, args] {
    const void* rounded = args.grad;
    if (args.rounded) {
      parallel_pieces(threads_, args.numel, kRoundGrain, [&](int64_t begin, int64_t end) {
        kernels(args.out_dtype)
            .narrow(args.grad + begin, at(args.rounded, begin, args.out_dtype), end - begin);
      });
      rounded = args.rounded;
    }
    const SquareSum sum = grad_square_sum(rounded, args.out_dtype, args.numel,
                                          static_cast<double*>(args.scratch), threads_);
    *args.square_sum = sum.sum;
    *args.first_nonfinite = sum.first_nonfinite;
  });
}

void HostOps::finish_norm(Queue& queue, const FinishNormArgs& args) {
  host_queue(queue).enqueue("finish_norm", [args] { *args.out = step_scalars(args); });
}

void HostOps::device_adam(Queue& queue, const DeviceAdamArgs& args) {
  host_queue(queue).enqueue("device_adam", [this, args] {
    if (args.scalars->skip) return;
    adam_step(args.shard, args.hyper, args.scalars->grad_scale, threads_);
  });
}

}  // namespace orlop::host
