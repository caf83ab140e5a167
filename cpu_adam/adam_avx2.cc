#include <immintrin.h>

#include "cpu_adam/adam_kernel.h"

namespace orlop {
namespace {

struct Lanes {
  static constexpr int kWidth = 8;
  static constexpr int kDoubleWidth = 4;
  using Float = __m256;
  using Double = __m256d;
  using Bits = uint32_t __attribute__((vector_size(32)));

  static Float broadcast(float x) { return _mm256_set1_ps(x); }
  static Bits broadcast(uint32_t x) { return (Bits)_mm256_set1_epi32(static_cast<int>(x)); }
  static Bits iota() { return Bits{0, 1, 2, 3, 4, 5, 6, 7}; }

  static Float load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Float x) { _mm256_storeu_ps(p, x); }
  static Bits load_u16(const uint16_t* p) { return (Bits)_mm256_cvtepu16_epi32(load_halves(p)); }
  static Bits load_i16(const uint16_t* p) { return (Bits)_mm256_cvtepi16_epi32(load_halves(p)); }
  static void store_u16(uint16_t* p, Bits x) {
    const __m256i low = _mm256_and_si256((__m256i)x, _mm256_set1_epi32(0xffff));
    const __m128i packed =
        _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    store_halves(p, packed);
  }
  static Float load_fp16(const uint16_t* p) { return _mm256_cvtph_ps(load_halves(p)); }
  static void store_fp16(uint16_t* p, Float x) {
    store_halves(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static Float sqrt(Float x) { return _mm256_sqrt_ps(x); }
  static Bits to_bits(Float x) { return (Bits)_mm256_castps_si256(x); }
  static Float to_float(Bits x) { return _mm256_castsi256_ps((__m256i)x); }
  static Bits zero_if_negative(Bits x) {
    return (Bits)_mm256_max_epi32((__m256i)x, _mm256_setzero_si256());
  }
  static Bits quiet_bits(Float x) {
    const __m256 quiet = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
    return to_bits(_mm256_blendv_ps(x, quiet, _mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  }

  static void add_squares(Float x, Double* sums) {
    const Double low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
    const Double high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    sums[0] = sums[0] + low * low;
    sums[1] = sums[1] + high * high;
  }
  static void store_sums(double* p, Double x) { _mm256_storeu_pd(p, x); }

 private:
  static __m128i load_halves(const uint16_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  }
  static void store_halves(uint16_t* p, __m128i x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), x);
  }
};

#include "cpu_adam/adam_kernel.inl.h"

}  // namespace

constinit const CpuKernels kAvx2Kernels = make_kernels<Lanes>();

}  // namespace orlop
