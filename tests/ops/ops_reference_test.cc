#include "ops_reference.h"

#include <gtest/gtest.h>

#include <functional>

namespace orlop::test {
namespace {

using Function = std::function<Values(const Values&)>;

double weighted_sum(const Values& weights, const Values& values) {
  double total = 0;
  for (size_t i = 0; i < values.size(); ++i) total += weights[i] * values[i];
  return total;
}

// The gradient of weights . function(x) by central differences.
Values numeric_gradient(const Function& function, const Values& weights, Values x) {
  constexpr double kStep = 1e-5;
  Values gradient(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const double before = x[i];
    x[i] = before + kStep;
    const double above = weighted_sum(weights, function(x));
    x[i] = before - kStep;
    const double below = weighted_sum(weights, function(x));
    x[i] = before;
    gradient[i] = (above - below) / (2 * kStep);
  }
  return gradient;
}

// Central differences leave about 1e-10 of truncation and 1e-11 of cancellation.
constexpr double kTolerance = 1e-7;

class OpsReference : public testing::Test {
 protected:
  Values values(int64_t numel) { return random_values(random_, numel, DType::kF32); }
  std::mt19937_64 random_{7};
};

TEST_F(OpsReference, NormGradients) {
  for (const bool center : {false, true}) {
    const NormShape shape{3, 7, 1e-5, center};
    const Values x = values(21), weight = values(7), bias = values(7), dy = values(21);
    const NormGradients gradients = reference_norm_backward(shape, x, weight, dy);
    const auto of_x = [&](const Values& v) { return reference_norm(shape, v, weight, bias).y; };
    const auto of_weight = [&](const Values& v) { return reference_norm(shape, x, v, bias).y; };
    const auto of_bias = [&](const Values& v) { return reference_norm(shape, x, weight, v).y; };
    expect_close(gradients.dx, numeric_gradient(of_x, dy, x), kTolerance, "dx");
    expect_close(gradients.dweight, numeric_gradient(of_weight, dy, weight), kTolerance, "dweight");
    expect_close(gradients.dbias, numeric_gradient(of_bias, dy, bias), kTolerance, "dbias");
  }
}

TEST_F(OpsReference, AttentionGradients) {
  const AttentionCase shape{{0, 1, 5, 8}, 4, 2, 3, 0.6};
  const Values q = values(8 * 4 * 3), k = values(8 * 2 * 3), v = values(8 * 2 * 3);
  const Values dout = values(8 * 4 * 3);
  const AttentionGradients gradients = reference_attention_backward(shape, q, k, v, dout);
  const auto of_q = [&](const Values& x) { return reference_attention(shape, x, k, v).out; };
  const auto of_k = [&](const Values& x) { return reference_attention(shape, q, x, v).out; };
  const auto of_v = [&](const Values& x) { return reference_attention(shape, q, k, x).out; };
  expect_close(gradients.dq, numeric_gradient(of_q, dout, q), kTolerance, "dq");
  expect_close(gradients.dk, numeric_gradient(of_k, dout, k), kTolerance, "dk");
  expect_close(gradients.dv, numeric_gradient(of_v, dout, v), kTolerance, "dv");
}

TEST_F(OpsReference, ActivationGradients) {
  for (const auto kind : {Activation::kSwiGlu, Activation::kGeluTanh, Activation::kGelu}) {
    const int64_t in_width = kind == Activation::kSwiGlu ? 10 : 5;
    const Values in = values(4 * in_width), dout = values(20);
    const auto of_in = [&](const Values& x) { return reference_activation(kind, x, 4, 5); };
    expect_close(reference_activation_backward(kind, in, dout, 4, 5),
                 numeric_gradient(of_in, dout, in), kTolerance, "din");
  }
}

TEST_F(OpsReference, CrossEntropyGradient) {
  const std::vector<int32_t> labels = {2, -100, 0, 6};
  const Values logits = values(4 * 7), scales(4, 0.25);
  const auto of_logits = [&](const Values& x) {
    return reference_cross_entropy(x, labels, 7, 0.25).loss;
  };
  expect_close(reference_cross_entropy(logits, labels, 7, 0.25).gradient,
               numeric_gradient(of_logits, scales, logits), kTolerance, "gradient");
}

// The inverse rotation is the transposed Jacobian when cos^2 + sin^2 is 1, which the caller's table
// has up to its scaling factor; here it is taken with the sine negated.
TEST_F(OpsReference, RopeGradientIsTheInverseRotation) {
  const std::vector<int32_t> positions = {2, 0, 1};
  Values table = values(3 * 2 * 2), inverse = table;
  for (size_t i = 1; i < inverse.size(); i += 2) inverse[i] = -inverse[i];
  const Values x = values(3 * 2 * 5), dy = values(3 * 2 * 5);
  const auto of_x = [&](const Values& v) { return reference_rope(v, positions, table, 2, 5, 4); };
  expect_close(reference_rope(dy, positions, inverse, 2, 5, 4), numeric_gradient(of_x, dy, x),
               kTolerance, "dx");
}

}  // namespace
}  // namespace orlop::test
