#include "base/check.h"
#include "ops_suite.h"
#include "tests/support/sanitized.h"

namespace orlop::test {
namespace {

struct MatmulShape {
  int64_t m, n, k;
  int64_t gap = 0;  // elements added to every leading dimension
};

// Ragged sizes, one row, one column, a depth of one, more rows than a panel holds, a depth that is
// cut.
const MatmulShape kShapes[] = {{1, 1, 1},      {1, 33, 7},      {5, 1, 129},      {17, 31, 65, 3},
                               {64, 64, 64},   {130, 97, 257},  {200, 200, 1},    {3, 40, 4100, 2},
                               {1025, 65, 33}, {70, 1601, 200}, {96, 96, 1300, 8}};

class MatmulRun {
 public:
  MatmulRun(TestDevice& device, const MatmulArgs& args, const Values& a, const Values& b)
      : device_(device), args_(args) {
    args_.a = device.put(a, args.in_dtype);
    args_.b = device.put(b, args.in_dtype);
  }

  Values run(const Values* c_before) {
    const int64_t numel = args_.m * args_.ldc;
    args_.c = c_before ? device_.put(*c_before, args_.out_dtype)
                       : device_.poisoned(numel, args_.out_dtype);
    device_.ops().matmul(device_.queue(), args_);
    const Values c = device_.get(args_.c, numel, args_.out_dtype);
    expect_gaps_poisoned(c, args_.m, args_.n, args_.ldc);
    return gather(c, args_.m, args_.n, args_.ldc);
  }

 private:
  TestDevice& device_;
  MatmulArgs args_;
};

MatmulArgs matmul_args(const MatmulShape& shape, bool trans_a, bool trans_b, DType in, DType out) {
  MatmulArgs args;
  args.m = shape.m, args.n = shape.n, args.k = shape.k;
  args.lda = (trans_a ? shape.m : shape.k) + shape.gap;
  args.ldb = (trans_b ? shape.k : shape.n) + shape.gap;
  args.ldc = shape.n + shape.gap;
  args.trans_a = trans_a, args.trans_b = trans_b;
  args.in_dtype = in, args.out_dtype = out;
  return args;
}

std::string describe(const MatmulShape& s, bool trans_a, bool trans_b) {
  return "c of m " + std::to_string(s.m) + " n " + std::to_string(s.n) + " k " +
         std::to_string(s.k) + (trans_a ? " trans_a" : "") + (trans_b ? " trans_b" : "");
}

}  // namespace

TEST_P(OpsSuite, MatmulOfEveryTransposition) {
  for (size_t number = 0; number < std::size(kShapes); ++number) {
    const MatmulShape& shape = kShapes[number];
    for (size_t transposed = 0; transposed < 4; ++transposed) {
      if (!is_tried(number, transposed, 4)) continue;
      const bool trans_a = transposed >= 2, trans_b = transposed % 2 == 1;
      TestDevice fresh(GetParam().make());
      const MatmulArgs args = matmul_args(shape, trans_a, trans_b, dtype(), dtype());
      const Values a = random(shape.m * shape.k), b = random(shape.k * shape.n);
      const int64_t a_cols = trans_a ? shape.m : shape.k, b_cols = trans_b ? shape.k : shape.n;
      MatmulRun run(fresh, args, scatter(a, shape.m * shape.k / a_cols, a_cols, args.lda),
                    scatter(b, shape.k * shape.n / b_cols, b_cols, args.ldb));
      const Values expected = reference_matmul(a, b, shape.m, shape.n, shape.k, trans_a, trans_b);
      expect_close(run.run(nullptr), expected, tolerance(), describe(shape, trans_a, trans_b));
    }
  }
}

TEST_P(OpsSuite, MatmulAddsTheBiasBeforeRounding) {
  const MatmulShape shape{37, 130, 66, 2};
  MatmulArgs args = matmul_args(shape, false, true, dtype(), dtype());
  const Values a = random(shape.m * shape.k), b = random(shape.k * shape.n);
  const Values bias = random(shape.n, 30.0);
  args.bias = device().put(bias, dtype());
  MatmulRun run(device(), args, scatter(a, shape.m, shape.k, args.lda),
                scatter(b, shape.n, shape.k, args.ldb));
  Values expected = reference_matmul(a, b, shape.m, shape.n, shape.k, false, true);
  for (size_t i = 0; i < expected.size(); ++i) {
    expected[i] += bias[i % static_cast<size_t>(shape.n)];
  }
  expect_close(run.run(nullptr), expected, tolerance(), "c");
}

// The gradient of a weight: fp32, added to what is there, exact inputs.
TEST_P(OpsSuite, MatmulAccumulatesIntoFp32) {
  for (const MatmulShape shape :
       {MatmulShape{33, 70, 129, 3}, MatmulShape{640, 330, 50}, MatmulShape{20, 24, 5000}}) {
    MatmulArgs args = matmul_args(shape, true, false, dtype(), DType::kF32);
    args.accumulate = true;
    const Values a = random(shape.m * shape.k), b = random(shape.k * shape.n);
    const Values before = random_values(random_, shape.m * shape.n, DType::kF32, 10.0);
    MatmulRun run(device(), args, scatter(a, shape.k, shape.m, args.lda),
                  scatter(b, shape.k, shape.n, args.ldb));
    Values expected = reference_matmul(a, b, shape.m, shape.n, shape.k, true, false);
    for (size_t i = 0; i < expected.size(); ++i) expected[i] += before[i];
    const Values strided = scatter(before, shape.m, shape.n, args.ldc);
    expect_close(run.run(&strided), expected, kF32Tolerance, describe(shape, true, false));
  }
}

TEST_P(OpsSuite, MatmulOverwritesFp32WithoutAccumulate) {
  const MatmulShape shape{19, 35, 2500};
  const MatmulArgs args = matmul_args(shape, true, true, dtype(), DType::kF32);
  const Values a = random(shape.m * shape.k), b = random(shape.k * shape.n);
  MatmulRun run(device(), args, a, b);
  expect_close(run.run(nullptr), reference_matmul(a, b, shape.m, shape.n, shape.k, true, true),
               kF32Tolerance, "c");
}

TEST_P(OpsSuite, MatmulGivesTheSameBitsAgain) {
  const MatmulShape shape{150, 200, 300};
  const MatmulArgs args = matmul_args(shape, false, true, dtype(), dtype());
  MatmulRun run(device(), args, random(shape.m * shape.k), random(shape.k * shape.n));
  const Values first = run.run(nullptr);
  for (int repeat = 0; repeat < 3; ++repeat) EXPECT_EQ(run.run(nullptr), first);
}

TEST_P(OpsSuite, MatmulRefusesToAccumulateIntoSixteenBits) {
  if (dtype() == DType::kF32) GTEST_SKIP() << "fp32 accumulates";
  MatmulArgs args = matmul_args({4, 4, 4}, false, false, dtype(), dtype());
  args.accumulate = true;
  EXPECT_THROW(ops().matmul(queue(), args), Error);
}

TEST_P(OpsSuite, BiasBackwardAddsColumnSums) {
  for (const auto& [m, n] : {std::pair<int64_t, int64_t>{1, 1}, {1, 300}, {77, 513}, {300, 31}}) {
    const Values dy = random(m * n), before = random_values(random_, n, DType::kF32);
    float* dbias = device().put_f32(before);
    ops().bias_backward(queue(), device().put(dy, dtype()), dbias, m, n, dtype());
    Values expected = before;
    for (size_t i = 0; i < dy.size(); ++i) expected[i % expected.size()] += dy[i];
    expect_close(device().get(dbias, n, DType::kF32), expected, kF32Tolerance, "dbias");
  }
}

}  // namespace orlop::test
