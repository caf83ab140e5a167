#include <bit>
#include <cmath>

#include "base/half.h"
#include "cpu_adam/adam_kernel.h"

namespace orlop {
namespace {

// One element at a time, for processors without AVX2 and as the oracle of the others. This file is
// compiled without special flags, so it may use headers with inline code.
struct Lanes {
  static constexpr int kWidth = 1;
  static constexpr int kDoubleWidth = 1;
  using Float = float;
  using Double = double;
  using Bits = uint32_t;

  static Float broadcast(float x) { return x; }
  static Bits broadcast(uint32_t x) { return x; }
  static Bits iota() { return 0; }

  static Float load(const float* p) { return *p; }
  static void store(float* p, Float x) { *p = x; }
  static Bits load_u16(const uint16_t* p) { return *p; }
  static Bits load_i16(const uint16_t* p) {
    return static_cast<uint32_t>(static_cast<int32_t>(static_cast<int16_t>(*p)));
  }
  static void store_u16(uint16_t* p, Bits x) { *p = static_cast<uint16_t>(x & 0xffffu); }
  static Float load_fp16(const uint16_t* p) { return fp16_to_float(*p); }
  static void store_fp16(uint16_t* p, Float x) { *p = float_to_fp16(x); }

  static Float fma(Float a, Float b, Float c) { return std::fma(a, b, c); }
  static Float sqrt(Float x) { return std::sqrt(x); }
  static Bits to_bits(Float x) { return std::bit_cast<uint32_t>(x); }
  static Float to_float(Bits x) { return std::bit_cast<float>(x); }
  static Bits zero_if_negative(Bits x) { return (x & 0x80000000u) != 0 ? 0 : x; }
  static Bits quiet_bits(Float x) { return std::isnan(x) ? 0x7fc00000u : to_bits(x); }

  static void add_squares(Float x, Double* sums) {
    const Double wide = x;
    *sums = *sums + wide * wide;
  }
  static void store_sums(double* p, Double x) { *p = x; }
};

#include "cpu_adam/adam_kernel.inl.h"

}  // namespace

constinit const CpuKernels kScalarKernels = make_kernels<Lanes>();

}  // namespace orlop
