#include <immintrin.h>

#include "cpu_adam/adam_kernel.h"

namespace orlop {
namespace {

struct Lanes {
  static constexpr int kWidth = 16;
  static constexpr int kDoubleWidth = 8;
  using Float = __m512;
  using Double = __m512d;
  using Bits = uint32_t __attribute__((vector_size(64)));

  static Float broadcast(float x) { return _mm512_set1_ps(x); }
  static Bits broadcast(uint32_t x) { return (Bits)_mm512_set1_epi32(static_cast<int>(x)); }
  static Bits iota() { return Bits{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

  static Float load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Float x) { _mm512_storeu_ps(p, x); }
  static Bits load_u16(const uint16_t* p) { return (Bits)_mm512_cvtepu16_epi32(load_halves(p)); }
  static Bits load_i16(const uint16_t* p) { return (Bits)_mm512_cvtepi16_epi32(load_halves(p)); }
  static void store_u16(uint16_t* p, Bits x) { store_halves(p, _mm512_cvtepi32_epi16((__m512i)x)); }
  static Float load_fp16(const uint16_t* p) { return _mm512_cvtph_ps(load_halves(p)); }
  static void store_fp16(uint16_t* p, Float x) {
    store_halves(p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static Float sqrt(Float x) { return _mm512_sqrt_ps(x); }
  static Bits to_bits(Float x) { return (Bits)_mm512_castps_si512(x); }
  static Float to_float(Bits x) { return _mm512_castsi512_ps((__m512i)x); }
  static Bits zero_if_negative(Bits x) {
    return (Bits)_mm512_max_epi32((__m512i)x, _mm512_setzero_si512());
  }
  static Bits quiet_bits(Float x) {
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return (Bits)_mm512_mask_mov_epi32(_mm512_castps_si512(x), nan, _mm512_set1_epi32(0x7fc00000));
  }

  static void add_squares(Float x, Double* sums) {
    const Double low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
    const Double high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
    sums[0] = sums[0] + low * low;
    sums[1] = sums[1] + high * high;
  }
  static void store_sums(double* p, Double x) { _mm512_storeu_pd(p, x); }

 private:
  static __m256i load_halves(const uint16_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static void store_halves(uint16_t* p, __m256i x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x);
  }
};

#include "cpu_adam/adam_kernel.inl.h"

}  // namespace

constinit const CpuKernels kAvx512Kernels = make_kernels<Lanes>();

}  // namespace orlop
