#include <algorithm>
#include <array>
#include <cmath>

#include "base/bytes.h"
#include "base/check.h"
#include "cpu_adam/adam.h"
#include "cpu_adam/fp_environment.h"
#include "cpu_adam/kernel_table.h"
#include "cpu_adam/thread_share.h"

namespace orlop {
namespace {

// Elements per unit of work of a thread: a multiple of the cache line for every plane, so that no
// two threads write one line (planes start line-aligned in the arena; elsewhere it costs time, not
// bits).
constexpr int64_t kThreadGrain = 1024;

constexpr int64_t kIndexBlock = int64_t{1} << 32;

// David Stafford's 64-bit finalizer (Mix13).
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

MasterLayout master_layout(DType compute) {
  switch (compute) {
    case DType::kBF16:
      return kSplitBf16;
    case DType::kF16:
      return kMasterAndFp16;
    case DType::kF32:
      return kMasterAlone;
    default:
      fail(ErrorCode::kUsage, "adam_step: compute dtype {} is not supported (F32, BF16, F16)",
           dtype_name(compute));
  }
}

MomentFormat moment_format(DType moment) {
  check(moment == DType::kF32 || moment == DType::kBF16, ErrorCode::kUsage,
        "adam_step: moment dtype {} is not supported (F32, BF16)", dtype_name(moment));
  return moment == DType::kF32 ? kMomentF32 : kMomentBf16;
}

struct Plane {
  const char* name;
  const void* data;
  int64_t element_bytes;
  bool needed;
};

std::array<Plane, 6> planes_of(const AdamShard& shard) {
  const MasterLayout layout = master_layout(shard.compute_dtype);
  const int64_t moment_bytes = moment_format(shard.moment_dtype) == kMomentF32 ? 4 : 2;
  const int64_t grad_bytes = grad_format(shard.grad_dtype) == kGradF32 ? 4 : 2;
  return {Plane{"param", shard.param, 2, layout != kMasterAlone},
          Plane{"lo", shard.lo, 2, layout == kSplitBf16},
          Plane{"master", shard.master, 4, layout != kSplitBf16},
          Plane{"exp_avg", shard.exp_avg, moment_bytes, true},
          Plane{"exp_avg_sq", shard.exp_avg_sq, moment_bytes, true},
          Plane{"grad", shard.grad, grad_bytes, true}};
}

void check_plane(const Plane& plane, const AdamShard& shard) {
  check(plane.needed || plane.data == nullptr, ErrorCode::kUsage,
        "adam_step: {} is given, but {} compute has no such plane; leave it null", plane.name,
        dtype_name(shard.compute_dtype));
  check(!plane.needed || plane.data != nullptr || shard.numel == 0, ErrorCode::kUsage,
        "adam_step: {} is null, but {} compute needs it for {} elements", plane.name,
        dtype_name(shard.compute_dtype), shard.numel);
  check(reinterpret_cast<uintptr_t>(plane.data) % static_cast<uintptr_t>(plane.element_bytes) == 0,
        ErrorCode::kUsage, "adam_step: {} at {} is not aligned to its {}-byte elements", plane.name,
        plane.data, plane.element_bytes);
}

void check_disjoint(const Plane& a, const Plane& b, int64_t numel) {
  if (a.data == nullptr || b.data == nullptr) return;
  const auto begin_a = reinterpret_cast<uintptr_t>(a.data);
  const auto begin_b = reinterpret_cast<uintptr_t>(b.data);
  const uintptr_t end_a = begin_a + static_cast<uintptr_t>(numel * a.element_bytes);
  const uintptr_t end_b = begin_b + static_cast<uintptr_t>(numel * b.element_bytes);
  check(end_a <= begin_b || end_b <= begin_a, ErrorCode::kUsage,
        "adam_step: {} ({} elements of {} B at {}) overlaps {} ({} B each at {})", a.name, numel,
        a.element_bytes, a.data, b.name, b.element_bytes, b.data);
}

void check_hyper(const AdamHyper& hyper, float grad_scale) {
  const auto check_range = [](const char* name, double value, bool ok, const char* range) {
    check(ok, ErrorCode::kUsage, "adam_step: {} = {} is outside {}", name, value, range);
  };
  const auto in = [](double value, double low) { return value >= low && std::isfinite(value); };
  check_range("lr", hyper.lr, in(hyper.lr, 0), "[0, inf)");
  check_range("beta1", hyper.beta1, hyper.beta1 >= 0 && hyper.beta1 < 1, "[0, 1)");
  check_range("beta2", hyper.beta2, hyper.beta2 >= 0 && hyper.beta2 < 1, "[0, 1)");
  check_range("eps", hyper.eps, in(hyper.eps, 0), "[0, inf)");
  check_range("weight_decay", hyper.weight_decay, in(hyper.weight_decay, 0), "[0, inf)");
  check_range("grad_scale", grad_scale, std::isfinite(grad_scale), "the finite numbers");
  check(hyper.step >= 1, ErrorCode::kUsage, "adam_step: step = {}, but steps count from 1",
        hyper.step);
}

void* advance(void* plane, int64_t bytes) {
  return plane == nullptr ? nullptr : static_cast<unsigned char*>(plane) + bytes;
}

// Runs elements [begin, end) of the shard, cut where the upper half of the element index changes.
void run_range(const AdamShard& shard, const AdamHyper& hyper, const AdamConstants& constants,
               AdamKernel kernel, int64_t begin, int64_t end) {
  const FpEnvironment environment;
  const auto moment_bytes = static_cast<int64_t>(dtype_bytes(shard.moment_dtype));
  const auto grad_bytes = static_cast<int64_t>(dtype_bytes(shard.grad_dtype));
  while (begin < end) {
    const int64_t index = shard.rng_offset + begin;
    const int64_t numel = std::min(end - begin, kIndexBlock - index % kIndexBlock);
    const AdamChunk chunk{
        .param = advance(shard.param, 2 * begin),
        .lo = shard.lo == nullptr ? nullptr : shard.lo + begin,
        .master = shard.master == nullptr ? nullptr : shard.master + begin,
        .exp_avg = advance(shard.exp_avg, moment_bytes * begin),
        .exp_avg_sq = advance(shard.exp_avg_sq, moment_bytes * begin),
        .grad = static_cast<const unsigned char*>(shard.grad) + grad_bytes * begin,
        .numel = numel,
        .index_low = static_cast<uint32_t>(index % kIndexBlock),
        .key = adam_rng_key(hyper.seed, hyper.step, static_cast<uint32_t>(index / kIndexBlock))};
    kernel(chunk, constants);
    begin += numel;
  }
}

}  // namespace

const CpuKernels& active_kernels() {
  switch (active_isa()) {
    case Isa::kAvx512:
      return kAvx512Kernels;
    case Isa::kAvx2:
      return kAvx2Kernels;
    case Isa::kScalar:
      break;
  }
  return kScalarKernels;
}

GradFormat grad_format(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return kGradF32;
    case DType::kBF16:
      return kGradBf16;
    case DType::kF16:
      return kGradF16;
    default:
      fail(ErrorCode::kUsage, "gradients of dtype {} are not supported (F32, BF16, F16)",
           dtype_name(dtype));
  }
}

AdamRngKey adam_rng_key(uint64_t seed, int64_t step, uint32_t index_high) {
  const uint64_t key = mix(mix(mix(seed) + static_cast<uint64_t>(step)) + index_high);
  return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
}

AdamConstants adam_constants(const AdamHyper& hyper, float grad_scale) {
  check_hyper(hyper, grad_scale);
  const FpEnvironment environment;
  const auto step = static_cast<double>(hyper.step);
  const double bias_correction1 = 1.0 - std::pow(hyper.beta1, step);
  const double bias_correction2 = 1.0 - std::pow(hyper.beta2, step);
  return {
      .grad_scale = hyper.maximize ? -grad_scale : grad_scale,
      .decay = static_cast<float>(hyper.decoupled ? 1.0 - hyper.lr * hyper.weight_decay : 1.0),
      .l2 = static_cast<float>(hyper.decoupled ? 0.0 : hyper.weight_decay),
      .one_minus_beta1 = static_cast<float>(1.0 - hyper.beta1),
      .beta2 = static_cast<float>(hyper.beta2),
      .one_minus_beta2 = static_cast<float>(1.0 - hyper.beta2),
      .step_size = static_cast<float>(hyper.lr / bias_correction1),
      .bias_correction2_sqrt = static_cast<float>(std::sqrt(bias_correction2)),
      .eps = static_cast<float>(hyper.eps),
  };
}

void check_adam_shard(const AdamShard& shard) {
  const std::array<Plane, 6> planes = planes_of(shard);
  check(shard.numel >= 0 && shard.rng_offset >= 0 && shard.rng_offset <= INT64_MAX - shard.numel,
        ErrorCode::kUsage, "adam_step: numel = {} and rng_offset = {} are no range of elements",
        shard.numel, shard.rng_offset);
  for (const Plane& plane : planes) check_plane(plane, shard);
  for (size_t a = 0; a < planes.size(); ++a) {
    for (size_t b = a + 1; b < planes.size(); ++b) {
      check_disjoint(planes[a], planes[b], shard.numel);
    }
  }
}

void adam_step(const AdamShard& shard, const AdamHyper& hyper, float grad_scale, int threads) {
  check_adam_shard(shard);
  check(threads >= 1, ErrorCode::kUsage, "adam_step: threads = {}, but at least 1 is needed",
        threads);
  const AdamConstants constants = adam_constants(hyper, grad_scale);
  const AdamKernel kernel =
      active_kernels().adam[master_layout(shard.compute_dtype)][moment_format(shard.moment_dtype)]
                           [grad_format(shard.grad_dtype)];
  const int64_t grains = ceil_div(shard.numel, kThreadGrain);
  share_between_threads(grains, threads, [&](int64_t begin, int64_t end) {
    run_range(shard, hyper, constants, kernel, begin * kThreadGrain,
              std::min(end * kThreadGrain, shard.numel));
  });
}

}  // namespace orlop
