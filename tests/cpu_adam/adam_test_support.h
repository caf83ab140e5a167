#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "cpu_adam/adam.h"

namespace orlop::test {

// Sets an environment variable (nullopt: removes it) until the end of the scope.
class ScopedEnv {
 public:
  ScopedEnv(const char* name, std::optional<std::string> value);
  ~ScopedEnv();
  ScopedEnv(const ScopedEnv&) = delete;
  ScopedEnv& operator=(const ScopedEnv&) = delete;

 private:
  std::string name_;
  std::optional<std::string> before_;
};

// The sets of this processor, scalar first.
std::vector<Isa> available_isas();

struct Layout {
  DType compute;
  DType moment;
  DType grad;
};
std::vector<Layout> all_layouts();
std::string layout_name(const Layout& layout);

// A shard that owns its planes, each between two guard zones which adam_step must leave alone.
// Masters, moments and gradients have ordinary magnitudes, the same for equal (numel, seed).
class OwnedShard {
 public:
  OwnedShard(const Layout& layout, int64_t numel, uint64_t seed);

  int64_t numel() const { return numel_; }
  const Layout& layout() const { return layout_; }
  // Elements [begin, end) as adam_step takes them.
  AdamShard view(int64_t begin, int64_t end);
  AdamShard view() { return view(0, numel_); }

  float grad(int64_t i) const;
  void set_grad(int64_t i, float value);
  float master(int64_t i) const;
  void set_master(int64_t i, float value);
  float exp_avg(int64_t i) const { return moment(exp_avg_, i); }
  float exp_avg_sq(int64_t i) const { return moment(exp_avg_sq_, i); }
  void set_moments(int64_t i, float exp_avg, float exp_avg_sq);
  // The 16-bit compute copy as a float.
  float compute_copy(int64_t i) const;
  // Leaves the rest as it is, as who writes bf16 weights in place.
  void write_hi(int64_t i, uint16_t bits);
  uint16_t hi(int64_t i) const;
  uint16_t lo(int64_t i) const;
  // New gradients, the same for equal seeds.
  void fill_grad(uint64_t seed);

  bool guards_are_intact() const;
  // The first element in which any plane differs; a NaN equals a NaN of the same format.
  friend ::testing::AssertionResult same_bits(const OwnedShard& a, const OwnedShard& b);

 private:
  struct Plane {
    std::vector<unsigned char> bytes;
    int64_t element_bytes = 0;
    unsigned char* at(int64_t i);
    const unsigned char* at(int64_t i) const;
  };
  static Plane make_plane(int64_t element_bytes, int64_t numel);
  float moment(const Plane& plane, int64_t i) const;
  std::vector<const Plane*> planes() const;
  uint64_t element_bits(const Plane& plane, int64_t i) const;

  Layout layout_;
  int64_t numel_;
  Plane param_, lo_, master_, exp_avg_, exp_avg_sq_, grad_;
};

// The state of one element in fp64 and torch's formula on it, written apart from the kernels.
struct ReferenceElement {
  double p, m, v;
  void step(double grad, const AdamHyper& hyper);
};

// |a - b| <= 1e-6 + 1e-5 |b|: the yardstick of the optimizer in fp32 after many steps.
::testing::AssertionResult near_reference(double value, double reference, int64_t index);

// Deterministic in (seed, i); roughly normal with the standard deviation given.
float test_value(uint64_t seed, int64_t i, float deviation);

}  // namespace orlop::test
