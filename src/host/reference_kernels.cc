#include <cmath>
#include <limits>

#include "host/element_types.h"
#include "host/kernels.h"
#include "host/reference_attention.h"

// The oracle: every formula as it is written in a textbook, in fp64, one element after the other.
namespace orlop::host {
namespace {

template <typename T>
double get(const void* base, int64_t index) {
  return static_cast<double>(T::load(static_cast<const typename T::Storage*>(base)[index]));
}

template <typename T>
void put(void* base, int64_t index, double value) {
  static_cast<typename T::Storage*>(base)[index] = T::store(static_cast<float>(value));
}

template <typename T>
struct Reference {
  static void widen(const void* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i)
      to[i] = T::load(static_cast<const typename T::Storage*>(from)[i]);
  }

  static void narrow(const float* from, void* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) static_cast<typename T::Storage*>(to)[i] = T::store(from[i]);
  }

  static void sum(const void* a, const void* b, void* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) put<T>(to, i, get<T>(a, i) + get<T>(b, i));
  }

  static void add(void* to, const void* from, int64_t n) { sum(to, from, to, n); }

  static void accumulate(float* to, const void* from, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      to[i] = static_cast<float>(static_cast<double>(to[i]) + get<T>(from, i));
    }
  }

  static void norm_forward(NormRow& row) {
    const auto count = static_cast<double>(row.cols);
    if (row.residual) add(row.x, row.residual, row.cols);
    double mean = 0;
    if (row.center) {
      for (int64_t c = 0; c < row.cols; ++c) mean += get<T>(row.x, c) / count;
    }
    double variance = 0;
    for (int64_t c = 0; c < row.cols; ++c) {
      variance += (get<T>(row.x, c) - mean) * (get<T>(row.x, c) - mean) / count;
    }
    const double rstd = 1.0 / std::sqrt(variance + static_cast<double>(row.eps));
    for (int64_t c = 0; c < row.cols; ++c) {
      const double bias = row.bias ? get<T>(row.bias, c) : 0.0;
      put<T>(row.y, c, (get<T>(row.x, c) - mean) * rstd * get<T>(row.weight, c) + bias);
    }
    row.rstd = static_cast<float>(rstd);
    row.mean = static_cast<float>(mean);
  }

  static void norm_backward(const NormRowBackward& row) {
    const double mean = static_cast<double>(row.mean), rstd = static_cast<double>(row.rstd);
    const auto count = static_cast<double>(row.cols);
    double mean_g = 0, mean_gn = 0;
    for (int64_t c = 0; c < row.cols; ++c) {
      const double n = (get<T>(row.x, c) - mean) * rstd;
      const double g = get<T>(row.dy, c) * get<T>(row.weight, c);
      mean_g += row.center ? g / count : 0.0;
      mean_gn += g * n / count;
      row.dweight[c] += static_cast<float>(get<T>(row.dy, c) * n);
      if (row.dbias) row.dbias[c] += static_cast<float>(get<T>(row.dy, c));
    }
    for (int64_t c = 0; c < row.cols; ++c) {
      const double n = (get<T>(row.x, c) - mean) * rstd;
      const double g = get<T>(row.dy, c) * get<T>(row.weight, c);
      const double before = row.accumulate_dx ? get<T>(row.dx, c) : 0.0;
      put<T>(row.dx, c, before + rstd * (g - mean_g - n * mean_gn));
    }
  }

  static void rope(const RopeRow& row) {
    const int64_t half = row.rotary_dim / 2;
    for (int64_t h = 0; h < row.heads; ++h) {
      for (int64_t c = 0; c < half; ++c) {
        const int64_t low = h * row.head_dim + c, high = low + half;
        const auto cosine = static_cast<double>(row.cos_sin[2 * c]);
        const double sine = static_cast<double>(row.cos_sin[2 * c + 1]) * (row.inverse ? -1 : 1);
        const double a = get<T>(row.x, low), b = get<T>(row.x, high);
        put<T>(row.x, low, a * cosine - b * sine);
        put<T>(row.x, high, b * cosine + a * sine);
      }
    }
  }

  static double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

  static void swiglu(const void* in, void* out, int64_t width) {
    for (int64_t c = 0; c < width; ++c) {
      const double gate = get<T>(in, c), up = get<T>(in, width + c);
      put<T>(out, c, gate * sigmoid(gate) * up);
    }
  }

  static void swiglu_backward(const void* in, const void* dout, void* din, int64_t width) {
    for (int64_t c = 0; c < width; ++c) {
      const double gate = get<T>(in, c), up = get<T>(in, width + c), d = get<T>(dout, c);
      const double s = sigmoid(gate);
      put<T>(din, c, d * up * (s + gate * s * (1 - s)));
      put<T>(din, width + c, d * gate * s);
    }
  }

  static constexpr double kSqrt2OverPi = 0.79788456080286535588;

  static void gelu_tanh(const void* in, void* out, int64_t width) {
    for (int64_t c = 0; c < width; ++c) {
      const double x = get<T>(in, c);
      put<T>(out, c, 0.5 * x * (1 + std::tanh(kSqrt2OverPi * (x + 0.044715 * x * x * x))));
    }
  }

  static void gelu_tanh_backward(const void* in, const void* dout, void* din, int64_t width) {
    for (int64_t c = 0; c < width; ++c) {
      const double x = get<T>(in, c);
      const double t = std::tanh(kSqrt2OverPi * (x + 0.044715 * x * x * x));
      const double slope = kSqrt2OverPi * (1 + 3 * 0.044715 * x * x);
      put<T>(din, c, get<T>(dout, c) * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope));
    }
  }

  static void gelu(const void* in, void* out, int64_t width) {
    for (int64_t c = 0; c < width; ++c) {
      const double x = get<T>(in, c);
      put<T>(out, c, 0.5 * x * (1 + std::erf(x / std::sqrt(2.0))));
    }
  }

  static void gelu_backward(const void* in, const void* dout, void* din, int64_t width) {
    for (int64_t c = 0; c < width; ++c) {
      const double x = get<T>(in, c);
      const double cdf = 0.5 * (1 + std::erf(x / std::sqrt(2.0)));
      const double density = 0.5 * kSqrt2OverPi * std::exp(-0.5 * x * x);  // 1 / sqrt(2 pi) e^...
      put<T>(din, c, get<T>(dout, c) * (cdf + x * density));
    }
  }

  static float cross_entropy(const CrossEntropyRow& row) {
    if (row.label < 0) {
      for (int64_t c = 0; row.write_gradient && c < row.vocab; ++c) put<T>(row.logits, c, 0.0);
      return 0.0f;
    }
    double highest = -std::numeric_limits<double>::infinity();
    for (int64_t c = 0; c < row.vocab; ++c) highest = std::fmax(highest, get<T>(row.logits, c));
    double total = 0;
    for (int64_t c = 0; c < row.vocab; ++c) total += std::exp(get<T>(row.logits, c) - highest);
    const double loss = std::log(total) + highest - get<T>(row.logits, row.label);
    for (int64_t c = 0; row.write_gradient && c < row.vocab; ++c) {
      const double probability = std::exp(get<T>(row.logits, c) - highest) / total;
      const double hot = c == row.label ? 1.0 : 0.0;
      put<T>(row.logits, c, static_cast<double>(row.scale) * (probability - hot));
    }
    return static_cast<float>(loss);
  }

  static constexpr Kernels table() {
    return {.widen = widen,
            .narrow = narrow,
            .add = add,
            .accumulate = accumulate,
            .sum = sum,
            .norm_forward = norm_forward,
            .norm_backward = norm_backward,
            .rope = rope,
            .swiglu = swiglu,
            .swiglu_backward = swiglu_backward,
            .gelu_tanh = gelu_tanh,
            .gelu_tanh_backward = gelu_tanh_backward,
            .gelu = gelu,
            .gelu_backward = gelu_backward,
            .cross_entropy = cross_entropy,
            .attention_forward = reference_attention_forward<T>,
            .attention_backward = reference_attention_backward<T>,
            .attention_scratch = reference_attention_scratch};
  }
};

void block_product(const BlockProduct& p) {
  for (int64_t i = 0; i < p.m; ++i) {
    for (int64_t j = 0; j < p.n; ++j) {
      double total = p.accumulate ? static_cast<double>(p.c[i * p.ldc + j]) : 0.0;
      for (int64_t k = 0; k < p.k; ++k) {
        total += static_cast<double>(p.a[i * p.a_row + k * p.a_col]) *
                 static_cast<double>(p.b[k * p.ldb + j]);
      }
      p.c[i * p.ldc + j] = static_cast<float>(total);
    }
  }
}

}  // namespace

constinit const KernelSet kReferenceKernels = {.f32 = Reference<Float32>::table(),
                                               .f16 = Reference<Float16>::table(),
                                               .bf16 = Reference<BFloat16>::table(),
                                               .block_product = block_product};

}  // namespace orlop::host
