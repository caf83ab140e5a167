// The row kernels, written once as loops that the compiler vectorises. Included inside the unnamed
// namespace of each instruction set's file, after kernels.h; ORLOP_LANES is the number of fp32
// lanes of one register. Reductions name their lanes with `omp simd`, so the order of a sum is
// fixed at compile time. Fused multiply-adds are allowed here: results may differ between
// instruction sets, never between runs.

inline uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
inline float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// Element types: load() widens to fp32, store() rounds to nearest even; both without branches.
struct F32 {
  using Storage = float;
  static float load(float value) { return value; }
  static float store(float value) { return value; }
};

struct BF16 {
  using Storage = uint16_t;
  static float load(uint16_t value) { return float_of(static_cast<uint32_t>(value) << 16); }
  static uint16_t store(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t nan = (bits >> 16) | 0x40u;
    return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
  }
};

struct F16 {
  using Storage = uint16_t;
  static float load(uint16_t value) {
    const uint32_t wide = value;
    const uint32_t sign = (wide & 0x8000u) << 16;
    const uint32_t shifted = (wide & 0x7fffu) << 13;
    const uint32_t finite = bits_of(float_of(shifted) * 0x1p112f);  // exact, subnormals included
    const uint32_t special = shifted | 0x7f800000u;                 // Inf and NaN
    return float_of(((wide & 0x7c00u) == 0x7c00u ? special : finite) | sign);
  }
  static uint16_t store(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    // Below 2^-14 the sum's ulp is 2^-24, so the addition rounds.
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
    uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
    result = magnitude >= 0x477ff000u ? 0x7c00u : result;  // 65520 and more
    result = magnitude > 0x7f800000u ? 0x7e00u : result;
    return static_cast<uint16_t>(sign | result);
  }
};

template <typename T>
const typename T::Storage* elements(const void* pointer) {
  return static_cast<const typename T::Storage*>(pointer);
}
template <typename T>
typename T::Storage* elements(void* pointer) {
  return static_cast<typename T::Storage*>(pointer);
}

// e^x for x <= 88, about 1 ulp: Cody-Waite reduction to |r| <= ln(2)/2, then the Taylor polynomial
// of degree 7. Arguments above 88 count as 88; below -87 the result is 0; a NaN stays a NaN.
inline float exp_of(float x) {
  float clamped = x > 88.0f ? 88.0f : x;
  clamped = clamped < -87.0f ? -87.0f : clamped;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float shifted = clamped * 1.44269504f + magic;
  const float n = shifted - magic;
  float r = clamped - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = 1.0f / 5040.0f;
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const float power = float_of((bits_of(shifted) + 127u) << 23);
  return x < -87.0f ? 0.0f : p * power;
}

inline float sigmoid_of(float x) { return 1.0f / (1.0f + exp_of(-x)); }

// erf(x), Abramowitz & Stegun 7.1.26: absolute error below 2e-7.
inline float erf_of(float x) {
  const float magnitude = x < 0.0f ? -x : x;
  const float t = 1.0f / (1.0f + 0.3275911f * magnitude);
  float p = 1.061405429f;
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const float result = 1.0f - p * t * exp_of(-magnitude * magnitude);
  return x < 0.0f ? -result : result;
}

template <typename T>
void widen(const void* from_pointer, float* to, int64_t n) {
  const auto* from = elements<T>(from_pointer);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] = T::load(from[i]);
}

template <typename T>
void narrow(const float* from, void* to_pointer, int64_t n) {
  auto* to = elements<T>(to_pointer);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] = T::store(from[i]);
}

template <typename T>
void sum(const void* a_pointer, const void* b_pointer, void* to_pointer, int64_t n) {
  const auto* a = elements<T>(a_pointer);
  const auto* b = elements<T>(b_pointer);
  auto* to = elements<T>(to_pointer);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] = T::store(T::load(a[i]) + T::load(b[i]));
}

template <typename T>
void add(void* to, const void* from, int64_t n) {
  sum<T>(to, from, to, n);
}

template <typename T>
void accumulate(float* to, const void* from_pointer, int64_t n) {
  const auto* from = elements<T>(from_pointer);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] += T::load(from[i]);
}

template <typename T>
void norm_forward(NormRow& row) {
  auto* x = elements<T>(row.x);
  const auto* weight = elements<T>(row.weight);
  auto* y = elements<T>(row.y);
  const int64_t cols = row.cols;
  if (row.residual) add<T>(row.x, row.residual, cols);
  const float inverse_cols = 1.0f / static_cast<float>(cols);
  float mean = 0.0f;
  if (row.center) {
#pragma omp simd reduction(+ : mean)
    for (int64_t c = 0; c < cols; ++c) mean += T::load(x[c]);
    mean *= inverse_cols;
  }
  float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (int64_t c = 0; c < cols; ++c) {
    const float centered = T::load(x[c]) - mean;
    squares += centered * centered;
  }
  const float rstd = 1.0f / __builtin_sqrtf(squares * inverse_cols + row.eps);
  if (row.bias) {
    const auto* bias = elements<T>(row.bias);
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) {
      y[c] = T::store((T::load(x[c]) - mean) * rstd * T::load(weight[c]) + T::load(bias[c]));
    }
  } else {
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) {
      y[c] = T::store((T::load(x[c]) - mean) * rstd * T::load(weight[c]));
    }
  }
  row.rstd = rstd;
  row.mean = mean;
}

// With n = (x - mean) * rstd and g = dy * weight:
//   dx = rstd * (g - [center] avg(g) - n * avg(g * n))
template <typename T, bool kAccumulate>
void norm_dx(const NormRowBackward& row, float mean_g, float mean_gn) {
  const auto* dy = elements<T>(row.dy);
  const auto* x = elements<T>(row.x);
  const auto* weight = elements<T>(row.weight);
  auto* dx = elements<T>(row.dx);
  const float mean = row.mean, rstd = row.rstd;
#pragma omp simd
  for (int64_t c = 0; c < row.cols; ++c) {
    const float n = (T::load(x[c]) - mean) * rstd;
    const float d = rstd * (T::load(dy[c]) * T::load(weight[c]) - mean_g - n * mean_gn);
    dx[c] = T::store(kAccumulate ? T::load(dx[c]) + d : d);
  }
}

template <typename T>
void norm_backward(const NormRowBackward& row) {
  const auto* dy = elements<T>(row.dy);
  const auto* x = elements<T>(row.x);
  const auto* weight = elements<T>(row.weight);
  float* dweight = row.dweight;
  const int64_t cols = row.cols;
  const float mean = row.mean, rstd = row.rstd;
  float sum_g = 0.0f, sum_gn = 0.0f;
#pragma omp simd reduction(+ : sum_g, sum_gn)
  for (int64_t c = 0; c < cols; ++c) {
    const float n = (T::load(x[c]) - mean) * rstd;
    const float d = T::load(dy[c]);
    const float g = d * T::load(weight[c]);
    sum_g += g;
    sum_gn += g * n;
    dweight[c] += d * n;
  }
  if (row.dbias) accumulate<T>(row.dbias, row.dy, cols);
  const float inverse_cols = 1.0f / static_cast<float>(cols);
  const float mean_g = row.center ? sum_g * inverse_cols : 0.0f;
  if (row.accumulate_dx) {
    norm_dx<T, true>(row, mean_g, sum_gn * inverse_cols);
  } else {
    norm_dx<T, false>(row, mean_g, sum_gn * inverse_cols);
  }
}

template <typename T>
void rope(const RopeRow& row) {
  const int64_t half = row.rotary_dim / 2;
  const float sign = row.inverse ? -1.0f : 1.0f;
  for (int64_t h = 0; h < row.heads; ++h) {
    auto* low = elements<T>(row.x) + h * row.head_dim;
    auto* high = low + half;
#pragma omp simd
    for (int64_t c = 0; c < half; ++c) {
      const float cosine = row.cos_sin[2 * c], sine = sign * row.cos_sin[2 * c + 1];
      const float a = T::load(low[c]), b = T::load(high[c]);
      low[c] = T::store(a * cosine - b * sine);
      high[c] = T::store(b * cosine + a * sine);
    }
  }
}

template <typename T>
void swiglu(const void* in, void* out_pointer, int64_t width) {
  const auto* gate = elements<T>(in);
  const auto* up = gate + width;
  auto* out = elements<T>(out_pointer);
#pragma omp simd
  for (int64_t c = 0; c < width; ++c) {
    const float g = T::load(gate[c]);
    out[c] = T::store(g * sigmoid_of(g) * T::load(up[c]));
  }
}

template <typename T>
void swiglu_backward(const void* in, const void* dout_pointer, void* din, int64_t width) {
  const auto* gate = elements<T>(in);
  const auto* up = gate + width;
  const auto* dout = elements<T>(dout_pointer);
  auto* dgate = elements<T>(din);
  auto* dup = dgate + width;
#pragma omp simd
  for (int64_t c = 0; c < width; ++c) {
    const float g = T::load(gate[c]), u = T::load(up[c]), d = T::load(dout[c]);
    const float s = sigmoid_of(g);
    dgate[c] = T::store(d * u * s * (1.0f + g * (1.0f - s)));
    dup[c] = T::store(d * g * s);
  }
}

// 0.5 * (1 + tanh(u)) is sigmoid(2u), with u = sqrt(2 / pi) * (x + 0.044715 x^3).
inline float gelu_tanh_twice_u(float x) { return 1.59576912f * x * (1.0f + 0.044715f * x * x); }

template <typename T>
void gelu_tanh(const void* in_pointer, void* out_pointer, int64_t width) {
  const auto* in = elements<T>(in_pointer);
  auto* out = elements<T>(out_pointer);
#pragma omp simd
  for (int64_t c = 0; c < width; ++c) {
    const float x = T::load(in[c]);
    out[c] = T::store(x * sigmoid_of(gelu_tanh_twice_u(x)));
  }
}

template <typename T>
void gelu_tanh_backward(const void* in_pointer, const void* dout_pointer, void* din_pointer,
                        int64_t width) {
  const auto* in = elements<T>(in_pointer);
  const auto* dout = elements<T>(dout_pointer);
  auto* din = elements<T>(din_pointer);
#pragma omp simd
  for (int64_t c = 0; c < width; ++c) {
    const float x = T::load(in[c]);
    const float s = sigmoid_of(gelu_tanh_twice_u(x));
    const float slope = 1.59576912f * (1.0f + 0.134145f * x * x);
    din[c] = T::store(T::load(dout[c]) * (s + x * s * (1.0f - s) * slope));
  }
}

template <typename T>
void gelu(const void* in_pointer, void* out_pointer, int64_t width) {
  const auto* in = elements<T>(in_pointer);
  auto* out = elements<T>(out_pointer);
#pragma omp simd
  for (int64_t c = 0; c < width; ++c) {
    const float x = T::load(in[c]);
    out[c] = T::store(0.5f * x * (1.0f + erf_of(0.707106781f * x)));
  }
}

template <typename T>
void gelu_backward(const void* in_pointer, const void* dout_pointer, void* din_pointer,
                   int64_t width) {
  const auto* in = elements<T>(in_pointer);
  const auto* dout = elements<T>(dout_pointer);
  auto* din = elements<T>(din_pointer);
#pragma omp simd
  for (int64_t c = 0; c < width; ++c) {
    const float x = T::load(in[c]);
    const float cdf = 0.5f * (1.0f + erf_of(0.707106781f * x));
    const float density = 0.398942280f * exp_of(-0.5f * x * x);
    din[c] = T::store(T::load(dout[c]) * (cdf + x * density));
  }
}

// The maximum of a row, in lanes so that it vectorises; a NaN is passed over.
template <typename T>
float highest_of(const typename T::Storage* row, int64_t n) {
  constexpr int64_t kWidth = 64;
  float lanes[kWidth];
  for (int64_t j = 0; j < kWidth; ++j) lanes[j] = -__builtin_inff();
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
#pragma omp simd
    for (int64_t j = 0; j < kWidth; ++j) {
      const float x = T::load(row[i + j]);
      lanes[j] = x > lanes[j] ? x : lanes[j];
    }
  }
  for (; i < n; ++i) {
    const float x = T::load(row[i]);
    lanes[0] = x > lanes[0] ? x : lanes[0];
  }
  float highest = lanes[0];
  for (int64_t j = 1; j < kWidth; ++j) highest = lanes[j] > highest ? lanes[j] : highest;
  return highest;
}

template <typename T>
float cross_entropy(const CrossEntropyRow& row) {
  auto* logits = elements<T>(row.logits);
  const int64_t vocab = row.vocab;
  if (row.label < 0) {
    if (row.write_gradient)
      __builtin_memset(logits, 0, static_cast<size_t>(vocab) * sizeof(*logits));
    return 0.0f;
  }
  const float highest = highest_of<T>(logits, vocab);
  float total = 0.0f;
#pragma omp simd reduction(+ : total)
  for (int64_t c = 0; c < vocab; ++c) total += exp_of(T::load(logits[c]) - highest);
  const float at_label = T::load(logits[row.label]) - highest;
  if (row.write_gradient) {
    const float factor = row.scale / total;
#pragma omp simd
    for (int64_t c = 0; c < vocab; ++c) {
      logits[c] = T::store(exp_of(T::load(logits[c]) - highest) * factor);
    }
    logits[row.label] = T::store(exp_of(at_label) * factor - row.scale);
  }
  return __builtin_logf(total) - at_label;
}
