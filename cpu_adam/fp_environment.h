#pragma once

#include <xmmintrin.h>

namespace orlop {

// While it lives, this thread rounds to nearest, keeps subnormals (no FTZ, no DAZ) and raises no
// trap; afterwards MXCSR is what it was, flags included.
class FpEnvironment {
 public:
  FpEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(kDefaultMxcsr); }
  ~FpEnvironment() { _mm_setcsr(saved_); }
  FpEnvironment(const FpEnvironment&) = delete;
  FpEnvironment& operator=(const FpEnvironment&) = delete;

 private:
  static constexpr unsigned kDefaultMxcsr = 0x1f80;
  unsigned saved_;
};

}  // namespace orlop
