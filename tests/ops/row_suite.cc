#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "base/check.h"
#include "ops_suite.h"

namespace orlop::test {
namespace {

struct NormLayout {
  int64_t rows, groups, cols, x_stride, y_stride;
};

// Ragged and single-element widths, QK norm inside wider rows, more rows than parts of the column
// sums.
const NormLayout kNormLayouts[] = {{1, 1, 1, 1, 1},
                                   {3, 1, 77, 77, 77},
                                   {33, 1, 576, 600, 580},
                                   {70, 3, 64, 320, 192},
                                   {2, 5, 8, 50, 41}};

}  // namespace

TEST_P(OpsSuite, NormForwardAndBackward) {
  for (const NormLayout& l : kNormLayouts) {
    for (const bool center : {false, true}) {
      if (center && l.cols == 1) continue;  // x - mean is exactly zero: nothing to compare
      const int64_t items = l.rows * l.groups, width = l.groups * l.cols;
      const Values x = random(items * l.cols), weight = random(l.cols), bias = random(l.cols);
      const Values dy = random(items * l.cols);
      const NormShape shape{items, l.cols, 1e-5, center};
      const NormResult expected = reference_norm(shape, x, weight, center ? bias : Values{});
      const NormGradients truth = reference_norm_backward(shape, x, weight, dy);
      NormArgs args;
      args.x = device().put(scatter(x, l.rows, width, l.x_stride), dtype());
      args.weight = device().put(weight, dtype());
      args.bias = center ? device().put(bias, dtype()) : nullptr;
      args.y = device().poisoned(l.rows * l.y_stride, dtype());
      args.rstd = static_cast<float*>(device().poisoned(items, DType::kF32));
      args.mean = center ? static_cast<float*>(device().poisoned(items, DType::kF32)) : nullptr;
      args.rows = l.rows, args.groups = l.groups, args.cols = l.cols;
      args.x_stride = l.x_stride, args.y_stride = l.y_stride;
      args.dtype = dtype();
      ops().norm_forward(queue(), args);
      const Values y = device().get(args.y, l.rows * l.y_stride, dtype());
      expect_gaps_poisoned(y, l.rows, width, l.y_stride);
      expect_close(gather(y, l.rows, width, l.y_stride), expected.y, tolerance(), "y");
      expect_close(device().get(args.rstd, items, DType::kF32), expected.rstd, kF32Tolerance,
                   "rstd");

      NormBackwardArgs back;
      back.dy = device().put(scatter(dy, l.rows, width, l.y_stride), dtype());
      back.x = args.x, back.weight = args.weight, back.rstd = args.rstd, back.mean = args.mean;
      back.dx = device().poisoned(l.rows * l.x_stride, dtype());
      const Values before = random_values(random_, l.cols, DType::kF32);
      back.dweight = device().put_f32(before);
      back.dbias = center ? device().put_f32(before) : nullptr;
      back.rows = l.rows, back.groups = l.groups, back.cols = l.cols;
      back.x_stride = l.x_stride, back.y_stride = l.y_stride;
      back.dtype = dtype();
      ops().norm_backward(queue(), back);
      const Values dx = device().get(back.dx, l.rows * l.x_stride, dtype());
      expect_gaps_poisoned(dx, l.rows, width, l.x_stride);
      // One column: dx is the difference of two equal numbers but for eps; only its size is
      // certain.
      if (l.cols > 1)
        expect_close(gather(dx, l.rows, width, l.x_stride), truth.dx, tolerance(), "dx");
      Values dweight = before, dbias = before;
      for (size_t c = 0; c < dweight.size(); ++c) {
        dweight[c] += truth.dweight[c];
        dbias[c] += truth.dbias[c];
      }
      expect_close(device().get(back.dweight, l.cols, DType::kF32), dweight, kF32Tolerance,
                   "dweight");
      if (!center) continue;
      expect_close(device().get(back.dbias, l.cols, DType::kF32), dbias, kF32Tolerance, "dbias");
    }
  }
}

TEST_P(OpsSuite, NormAddsTheResidualFirstAndKeepsTheSum) {
  const int64_t rows = 5, cols = 130;
  const Values x = random(rows * cols), residual = random(rows * cols), weight = random(cols);
  Values sum = x;
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += residual[i];
  sum = rounded(sum, dtype());
  NormArgs args;
  args.x = device().put(x, dtype());
  args.residual = device().put(residual, dtype());
  args.weight = device().put(weight, dtype());
  args.y = device().poisoned(rows * cols, dtype());
  args.rstd = static_cast<float*>(device().poisoned(rows, DType::kF32));
  args.rows = rows, args.cols = args.x_stride = args.y_stride = cols;
  args.dtype = dtype();
  ops().norm_forward(queue(), args);
  EXPECT_EQ(device().get(args.x, rows * cols, dtype()), sum);
  const NormShape shape{rows, cols, 1e-5, false};
  expect_close(device().get(args.y, rows * cols, dtype()), reference_norm(shape, sum, weight, {}).y,
               tolerance(), "y");
}

TEST_P(OpsSuite, NormBackwardAccumulatesAndMayOverwriteItsInput) {
  const int64_t rows = 40, cols = 96;
  const NormShape shape{rows, cols, 1e-5, false};
  const Values x = random(rows * cols), weight = random(cols), dy = random(rows * cols);
  const Values before = random(rows * cols);
  const NormGradients truth = reference_norm_backward(shape, x, weight, dy);
  const NormResult forward = reference_norm(shape, x, weight, {});
  NormBackwardArgs back;
  back.x = device().put(x, dtype());
  back.weight = device().put(weight, dtype());
  back.rstd = device().put_f32(forward.rstd);
  back.rows = rows, back.cols = back.x_stride = back.y_stride = cols;
  back.dtype = dtype();

  void* alias = device().put(dy, dtype());
  back.dy = back.dx = alias;
  back.dweight = device().put_f32(Values(static_cast<size_t>(cols)));
  ops().norm_backward(queue(), back);
  expect_close(device().get(alias, rows * cols, dtype()), truth.dx, tolerance(),
               "dx in place of dy");

  back.dy = device().put(dy, dtype());
  back.dx = device().put(before, dtype());
  back.accumulate_dx = true;
  ops().norm_backward(queue(), back);
  Values expected = before;
  for (size_t i = 0; i < expected.size(); ++i) expected[i] += truth.dx[i];
  expect_close(device().get(back.dx, rows * cols, dtype()), expected, tolerance(),
               "accumulated dx");
  Values twice = truth.dweight;
  for (double& value : twice) value *= 2;
  expect_close(device().get(back.dweight, cols, DType::kF32), twice, kF32Tolerance, "dweight");
}

TEST_P(OpsSuite, RopeRotatesAndRotatesBack) {
  const int64_t heads = 3, head_dim = 20, stride = 90;
  for (const int64_t rotary_dim : {20, 12, 2}) {
    const std::vector<int32_t> positions = {0, 1, 2, 0, 5, 4, 3};
    const auto rows = static_cast<int64_t>(positions.size());
    Values table;
    for (int position = 0; position < 6; ++position) {
      for (int64_t c = 0; c < rotary_dim / 2; ++c) {
        const double angle = position * std::pow(100.0, -2.0 * static_cast<double>(c) / 20.0);
        table.push_back(std::cos(angle));
        table.push_back(std::sin(angle));
      }
    }
    table = rounded(table, DType::kF32);
    const Values x = random(rows * heads * head_dim);
    RopeArgs args;
    args.x = device().put(scatter(x, rows, heads * head_dim, stride), dtype());
    args.positions = device().put_raw(positions);
    args.cos_sin = device().put_f32(table);
    args.rows = rows, args.heads = heads, args.head_dim = head_dim, args.rotary_dim = rotary_dim;
    args.row_stride = stride;
    args.dtype = dtype();
    ops().rope(queue(), args);
    const Values rotated = device().get(args.x, rows * stride, dtype());
    expect_gaps_poisoned(rotated, rows, heads * head_dim, stride);
    expect_close(gather(rotated, rows, heads * head_dim, stride),
                 reference_rope(x, positions, table, heads, head_dim, rotary_dim), tolerance(),
                 "x");
    args.inverse = true;
    ops().rope(queue(), args);
    const Values back = device().get(args.x, rows * stride, dtype());
    expect_close(gather(back, rows, heads * head_dim, stride), x, tolerance(), "rotated back");
  }
}

TEST_P(OpsSuite, ActivationForwardAndBackward) {
  for (const auto kind : {Activation::kSwiGlu, Activation::kGeluTanh, Activation::kGelu}) {
    for (const auto& [rows, width] : {std::pair<int64_t, int64_t>{1, 1}, {3, 131}, {9, 256}}) {
      const int64_t in_numel = rows * width * (kind == Activation::kSwiGlu ? 2 : 1);
      Values in = random(in_numel, 2.0);
      if (rows > 1) {  // far in the tails: no overflow, no NaN
        in[0] = -60.0;
        in.back() = 60.0;
      }
      const Values dout = random(rows * width);
      ActivationArgs args;
      args.kind = kind;
      args.in = device().put(in, dtype());
      args.out = device().poisoned(rows * width, dtype());
      args.dout = device().put(dout, dtype());
      args.din = device().poisoned(in_numel, dtype());
      args.rows = rows, args.width = width, args.dtype = dtype();
      ops().activation_forward(queue(), args);
      expect_close(device().get(args.out, rows * width, dtype()),
                   reference_activation(kind, in, rows, width), tolerance(), "out");
      const Values truth = reference_activation_backward(kind, in, dout, rows, width);
      ops().activation_backward(queue(), args);
      const Values din = device().get(args.din, in_numel, dtype());
      expect_close(din, truth, tolerance(), "din");
      void* alias = device().put(in, dtype());
      args.in = args.din = alias;
      ops().activation_backward(queue(), args);
      EXPECT_EQ(device().get(alias, in_numel, dtype()), din) << "in place";
    }
  }
}

TEST_P(OpsSuite, EmbeddingForwardWithAndWithoutPositions) {
  const int64_t vocab = 11, cols = 37;
  const std::vector<int32_t> tokens = {10, 0, 3, 3, 7}, positions = {0, 1, 2, 0, 1};
  const auto rows = static_cast<int64_t>(tokens.size());
  const Values table = random(vocab * cols), position_table = random(3 * cols);
  EmbeddingArgs args;
  args.tokens = device().put_raw(tokens);
  args.table = device().put(table, dtype());
  args.out = device().poisoned(rows * cols, dtype());
  args.rows = rows, args.cols = cols, args.vocab = vocab;
  args.dtype = dtype();
  ops().embedding_forward(queue(), args);
  Values expected(static_cast<size_t>(rows * cols)), summed = expected;
  for (size_t i = 0; i < expected.size(); ++i) {
    const size_t row = i / static_cast<size_t>(cols), col = i % static_cast<size_t>(cols);
    expected[i] = table[static_cast<size_t>(tokens[row] * cols) + col];
    summed[i] = expected[i] + position_table[static_cast<size_t>(positions[row] * cols) + col];
  }
  EXPECT_EQ(device().get(args.out, rows * cols, dtype()), expected);
  args.positions = device().put_raw(positions);
  args.positions_table = device().put(position_table, dtype());
  ops().embedding_forward(queue(), args);
  EXPECT_EQ(device().get(args.out, rows * cols, dtype()), rounded(summed, dtype()));
}

TEST_P(OpsSuite, EmbeddingBackwardSumsRowsOfEveryToken) {
  const int64_t vocab = 50, cols = 65, rows = 300;
  std::uniform_int_distribution<int32_t> token(0, 19);
  std::map<int32_t, std::vector<int32_t>> rows_of;
  for (int32_t r = 0; r < rows; ++r) rows_of[token(random_)].push_back(r);
  std::vector<int32_t> sorted_rows, run_begin = {0}, run_index;
  for (const auto& [id, at] : rows_of) {
    sorted_rows.insert(sorted_rows.end(), at.begin(), at.end());
    run_begin.push_back(static_cast<int32_t>(sorted_rows.size()));
    run_index.push_back(id);
  }
  const Values dy = random(rows * cols), before = random_values(random_, vocab * cols, DType::kF32);
  EmbeddingBackwardArgs args;
  args.dy = device().put(dy, dtype());
  args.dtable = device().put_f32(before);
  args.sorted_rows = device().put_raw(sorted_rows);
  args.run_begin = device().put_raw(run_begin);
  args.run_index = device().put_raw(run_index);
  args.runs = static_cast<int64_t>(run_index.size());
  args.rows = rows, args.cols = cols, args.dtype = dtype();
  ops().embedding_backward(queue(), args);
  Values expected = before;
  for (const auto& [id, at] : rows_of) {
    for (const int32_t r : at) {
      for (int64_t c = 0; c < cols; ++c) {
        expected[static_cast<size_t>(id * cols + c)] += dy[static_cast<size_t>(r * cols + c)];
      }
    }
  }
  expect_close(device().get(args.dtable, vocab * cols, DType::kF32), expected, kF32Tolerance,
               "dtable");
}

TEST_P(OpsSuite, CrossEntropyInPlace) {
  for (const int64_t vocab : {2, 129, 5003}) {
    const auto last = static_cast<int32_t>(vocab - 1);
    const std::vector<int32_t> labels = {0, -100, last, 1, -1};
    const auto rows = static_cast<int64_t>(labels.size());
    Values logits = random(rows * vocab, 3.0);
    const double scale = 0.25;
    const auto expected = reference_cross_entropy(logits, labels, vocab, scale);
    CrossEntropyArgs args;
    args.logits = device().put(logits, dtype());
    args.labels = device().put_raw(labels);
    args.loss = static_cast<float*>(device().poisoned(rows, DType::kF32));
    args.scale = device().put_f32({scale});
    args.rows = rows, args.vocab = vocab, args.dtype = dtype();
    args.write_gradient = false;
    ops().cross_entropy(queue(), args);
    expect_close(device().get(args.loss, rows, DType::kF32), expected.loss, kF32Tolerance, "loss");
    EXPECT_EQ(device().get(args.logits, rows * vocab, dtype()), logits) << "without a gradient";
    args.write_gradient = true;
    args.loss = static_cast<float*>(device().poisoned(rows, DType::kF32));
    ops().cross_entropy(queue(), args);
    expect_close(device().get(args.loss, rows, DType::kF32), expected.loss, kF32Tolerance, "loss");
    expect_close(device().get(args.logits, rows * vocab, dtype()), expected.gradient, tolerance(),
                 "gradient");
  }
}

// Logits of a few hundred overflow e^x unless the maximum is taken out first.
TEST_P(OpsSuite, CrossEntropyOfLargeLogits) {
  CrossEntropyArgs args;
  args.logits = device().put({-300.0, 400.0, 400.0, 16.0}, dtype());
  args.labels = device().put_raw(std::vector<int32_t>{0});
  args.loss = static_cast<float*>(device().poisoned(1, DType::kF32));
  args.scale = device().put_f32({1.0});
  args.rows = 1, args.vocab = 4, args.dtype = dtype();
  ops().cross_entropy(queue(), args);
  expect_close(device().get(args.loss, 1, DType::kF32), {700.0 + std::log(2.0)}, kF32Tolerance,
               "loss");
  expect_close(device().get(args.logits, 4, dtype()), {-1.0, 0.5, 0.5, 0.0}, tolerance(),
               "gradient");
}

TEST_P(OpsSuite, AddOfRaggedLengths) {
  for (const int64_t numel : {1, 31, 257, 100003}) {
    const Values to = random(numel), from = random(numel);
    Values expected = to;
    for (size_t i = 0; i < expected.size(); ++i) expected[i] += from[i];
    void* device_to = device().put(to, dtype());
    ops().add(queue(), device_to, device().put(from, dtype()), numel, dtype());
    EXPECT_EQ(device().get(device_to, numel, dtype()), rounded(expected, dtype()));
  }
}

TEST_P(OpsSuite, HeadChunkRowsDependOnShapeOnly) {
  for (const int64_t vocab : {100, 49152, 151936}) {
    const int64_t rows = ops().head_chunk_rows(vocab, dtype());
    EXPECT_GE(rows, 1);
    EXPECT_EQ(rows, ops().head_chunk_rows(vocab, dtype()));
  }
}

}  // namespace orlop::test
