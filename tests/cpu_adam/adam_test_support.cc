#include "adam_test_support.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "base/half.h"

namespace orlop::test {
namespace {

constexpr int64_t kGuardBytes = 64;
constexpr unsigned char kGuard = 0xa5;

template <typename T>
T read(const unsigned char* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(T));
  return value;
}

template <typename T>
void write(unsigned char* bytes, T value) {
  std::memcpy(bytes, &value, sizeof(T));
}

float decode(const unsigned char* bytes, DType dtype) {
  if (dtype == DType::kF32) return read<float>(bytes);
  const auto half = read<uint16_t>(bytes);
  return dtype == DType::kBF16 ? bf16_to_float(half) : fp16_to_float(half);
}

void encode(unsigned char* bytes, DType dtype, float value) {
  if (dtype == DType::kF32) return write(bytes, value);
  write(bytes, dtype == DType::kBF16 ? float_to_bf16(value) : float_to_fp16(value));
}

}  // namespace

ScopedEnv::ScopedEnv(const char* name, std::optional<std::string> value) : name_(name) {
  if (const char* before = std::getenv(name)) before_ = before;
  value ? setenv(name, value->c_str(), 1) : unsetenv(name);
}

ScopedEnv::~ScopedEnv() {
  before_ ? setenv(name_.c_str(), before_->c_str(), 1) : unsetenv(name_.c_str());
}

std::vector<Isa> available_isas() {
  std::vector<Isa> isas;
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    const ScopedEnv limit("ORLOP_MAX_ISA", isa_name(isa));
    if (active_isa() == isa) isas.push_back(isa);
  }
  return isas;
}

std::vector<Layout> all_layouts() {
  std::vector<Layout> layouts;
  for (const DType compute : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const DType moment : {DType::kF32, DType::kBF16}) {
      for (const DType grad : {DType::kF32, DType::kBF16, DType::kF16}) {
        layouts.push_back({compute, moment, grad});
      }
    }
  }
  return layouts;
}

std::string layout_name(const Layout& layout) {
  std::string name;
  for (const DType dtype : {layout.compute, layout.moment, layout.grad}) {
    name += name.empty() ? "" : "_";
    name += dtype_name(dtype);
  }
  return name;
}

float test_value(uint64_t seed, int64_t i, float deviation) {
  uint64_t x = (seed + 1) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(i) * 0xd1342543de82ef95u;
  double sum = 0;  // of four uniform numbers: variance 1/3
  for (int k = 0; k < 4; ++k) {
    x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93u;
    sum += static_cast<double>((x ^ (x >> 32)) >> 11) * 0x1p-53 - 0.5;
  }
  return static_cast<float>(sum * std::sqrt(3.0)) * deviation;
}

unsigned char* OwnedShard::Plane::at(int64_t i) {
  return bytes.data() + kGuardBytes + i * element_bytes;
}

const unsigned char* OwnedShard::Plane::at(int64_t i) const {
  return bytes.data() + kGuardBytes + i * element_bytes;
}

OwnedShard::Plane OwnedShard::make_plane(int64_t element_bytes, int64_t numel) {
  return {std::vector<unsigned char>(static_cast<size_t>(numel * element_bytes + 2 * kGuardBytes),
                                     kGuard),
          element_bytes};
}

OwnedShard::OwnedShard(const Layout& layout, int64_t numel, uint64_t seed)
    : layout_(layout), numel_(numel) {
  const auto moment_bytes = static_cast<int64_t>(dtype_bytes(layout.moment));
  if (layout.compute != DType::kF32) param_ = make_plane(2, numel);
  if (layout.compute == DType::kBF16) lo_ = make_plane(2, numel);
  if (layout.compute != DType::kBF16) master_ = make_plane(4, numel);
  exp_avg_ = make_plane(moment_bytes, numel);
  exp_avg_sq_ = make_plane(moment_bytes, numel);
  grad_ = make_plane(static_cast<int64_t>(dtype_bytes(layout.grad)), numel);
  for (int64_t i = 0; i < numel; ++i) {
    set_master(i, test_value(seed, i, 0.5f));
    set_moments(i, test_value(seed + 1, i, 0.01f), std::abs(test_value(seed + 2, i, 1e-4f)));
  }
  fill_grad(seed + 3);
}

void OwnedShard::fill_grad(uint64_t seed) {
  for (int64_t i = 0; i < numel_; ++i) set_grad(i, test_value(seed, i, 0.05f));
}

AdamShard OwnedShard::view(int64_t begin, int64_t end) {
  const auto pointer = [&](Plane& plane) -> void* {
    return plane.bytes.empty() ? nullptr : plane.at(begin);
  };
  return {.compute_dtype = layout_.compute,
          .moment_dtype = layout_.moment,
          .grad_dtype = layout_.grad,
          .param = pointer(param_),
          .lo = static_cast<uint16_t*>(pointer(lo_)),
          .master = static_cast<float*>(pointer(master_)),
          .exp_avg = pointer(exp_avg_),
          .exp_avg_sq = pointer(exp_avg_sq_),
          .grad = pointer(grad_),
          .numel = end - begin,
          .rng_offset = begin};
}

float OwnedShard::grad(int64_t i) const { return decode(grad_.at(i), layout_.grad); }
void OwnedShard::set_grad(int64_t i, float value) { encode(grad_.at(i), layout_.grad, value); }

uint16_t OwnedShard::hi(int64_t i) const { return read<uint16_t>(param_.at(i)); }
void OwnedShard::write_hi(int64_t i, uint16_t bits) { write(param_.at(i), bits); }
uint16_t OwnedShard::lo(int64_t i) const { return read<uint16_t>(lo_.at(i)); }

float OwnedShard::master(int64_t i) const {
  if (layout_.compute != DType::kBF16) return read<float>(master_.at(i));
  const auto low = static_cast<int16_t>(lo(i));
  const int64_t bits = (int64_t{hi(i)} << 16) + low;
  return std::bit_cast<float>(static_cast<uint32_t>(bits));
}

void OwnedShard::set_master(int64_t i, float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (layout_.compute == DType::kBF16) {
    write(param_.at(i), static_cast<uint16_t>((bits + 0x8000u) >> 16));
    write(lo_.at(i), static_cast<uint16_t>(bits & 0xffffu));
    return;
  }
  write(master_.at(i), value);
  if (layout_.compute == DType::kF16) write(param_.at(i), float_to_fp16(value));
}

float OwnedShard::moment(const Plane& plane, int64_t i) const {
  return decode(plane.at(i), layout_.moment);
}

void OwnedShard::set_moments(int64_t i, float exp_avg, float exp_avg_sq) {
  encode(exp_avg_.at(i), layout_.moment, exp_avg);
  encode(exp_avg_sq_.at(i), layout_.moment, exp_avg_sq);
}

float OwnedShard::compute_copy(int64_t i) const { return decode(param_.at(i), layout_.compute); }

std::vector<const OwnedShard::Plane*> OwnedShard::planes() const {
  return {&param_, &lo_, &master_, &exp_avg_, &exp_avg_sq_, &grad_};
}

bool OwnedShard::guards_are_intact() const {
  const auto is_guard = [](unsigned char byte) { return byte == kGuard; };
  for (const Plane* plane : planes()) {
    if (plane->bytes.empty()) continue;
    if (!std::all_of(plane->bytes.begin(), plane->bytes.begin() + kGuardBytes, is_guard) ||
        !std::all_of(plane->bytes.end() - kGuardBytes, plane->bytes.end(), is_guard)) {
      return false;
    }
  }
  return true;
}

// The element's bits, every NaN as one value.
uint64_t OwnedShard::element_bits(const Plane& plane, int64_t i) const {
  constexpr uint64_t kNan = ~uint64_t{0};
  if (plane.element_bytes == 4) {
    return std::isnan(read<float>(plane.at(i))) ? kNan : read<uint32_t>(plane.at(i));
  }
  const bool is_moment = &plane == &exp_avg_ || &plane == &exp_avg_sq_;
  const DType dtype = is_moment          ? layout_.moment
                      : &plane == &grad_ ? layout_.grad
                                         : layout_.compute;
  if (&plane != &lo_ && std::isnan(decode(plane.at(i), dtype))) return kNan;
  return read<uint16_t>(plane.at(i));
}

::testing::AssertionResult same_bits(const OwnedShard& a, const OwnedShard& b) {
  static constexpr const char* kNames[] = {"param",   "lo",         "master",
                                           "exp_avg", "exp_avg_sq", "grad"};
  for (size_t k = 0; k < 6; ++k) {
    const OwnedShard::Plane& plane_a = *a.planes()[k];
    const OwnedShard::Plane& plane_b = *b.planes()[k];
    if (plane_a.bytes == plane_b.bytes) continue;
    for (int64_t i = 0; i < a.numel(); ++i) {
      const uint64_t bits_a = a.element_bits(plane_a, i);
      const uint64_t bits_b = b.element_bits(plane_b, i);
      if (bits_a == bits_b) continue;
      return ::testing::AssertionFailure()
             << kNames[k] << "[" << i << "] of " << a.numel() << ", " << layout_name(a.layout())
             << ": bits " << std::hex << bits_a << " and " << bits_b;
    }
  }
  if (!a.guards_are_intact() || !b.guards_are_intact()) {
    return ::testing::AssertionFailure() << "bytes outside the shard were written";
  }
  return ::testing::AssertionSuccess();
}

void ReferenceElement::step(double grad, const AdamHyper& hyper) {
  if (hyper.maximize) grad = -grad;
  if (hyper.decoupled) {
    p *= 1 - hyper.lr * hyper.weight_decay;
  } else {
    grad += hyper.weight_decay * p;
  }
  m = hyper.beta1 * m + (1 - hyper.beta1) * grad;
  v = hyper.beta2 * v + (1 - hyper.beta2) * grad * grad;
  const double t = static_cast<double>(hyper.step);
  const double m_hat = m / (1 - std::pow(hyper.beta1, t));
  const double v_hat = v / (1 - std::pow(hyper.beta2, t));
  p -= hyper.lr * m_hat / (std::sqrt(v_hat) + hyper.eps);
}

::testing::AssertionResult near_reference(double value, double reference, int64_t index) {
  const double tolerance = 1e-6 + 1e-5 * std::abs(reference);
  if (std::abs(value - reference) <= tolerance) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "element " << index << ": " << value << " against " << reference << ", difference "
         << value - reference << ", allowed " << tolerance;
}

}  // namespace orlop::test
