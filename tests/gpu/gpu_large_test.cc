// Row operations over more than 2^31 elements: the last rows must come out bit for bit as they do
// when the operation gets them alone.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "device_data.h"

namespace orlop::test {
namespace {

auto* const environment =
    static_cast<GpuEnvironment*>(testing::AddGlobalTestEnvironment(new GpuEnvironment(16 * kGiB)));

constexpr int64_t kRows = 524289 + 13;
constexpr int64_t kCols = 4096;  // kRows * kCols > 2^31
constexpr int64_t kTail = 5;
constexpr int64_t kNumel = kRows * kCols;

class GpuLarge : public testing::Test {
 protected:
  void SetUp() override { SKIP_WITHOUT_GPU(); }

  // The last kTail rows of (rows, cols), copied to their own place.
  std::byte* tail_copy(const std::byte* x, int64_t cols, size_t element_bytes = 2) {
    const size_t bytes = static_cast<size_t>(kTail * cols) * element_bytes;
    std::byte* out = data_.take(bytes);
    data_.queue().copy_on_device(out, tail(x, cols, element_bytes), bytes);
    return out;
  }
  static const std::byte* tail(const void* x, int64_t cols, size_t element_bytes = 2) {
    return static_cast<const std::byte*>(x) +
           (kRows - kTail) * cols * static_cast<int64_t>(element_bytes);
  }
  void expect_tail(const void* large, const void* small, int64_t cols, size_t element_bytes = 2) {
    const size_t bytes = static_cast<size_t>(kTail * cols) * element_bytes;
    EXPECT_EQ(data_.get<uint8_t>(tail(large, cols, element_bytes), bytes),
              data_.get<uint8_t>(small, bytes));
    const auto values = data_.get<uint8_t>(small, bytes);
    EXPECT_NE(values, std::vector<uint8_t>(bytes, 0xff)) << "nothing was written";
  }

  Ops& ops() { return data_.ops(); }
  Queue& queue() { return data_.queue(); }

  DeviceData data_;
};

TEST_F(GpuLarge, NormForwardAndBackward) {
  std::byte* x = data_.random_bf16(kNumel, 2.0f, 1);
  const void* weight = data_.random_bf16(kCols, 1.0f, 2);
  std::byte* small_x = tail_copy(x, kCols);
  NormArgs large{.x = x, .weight = weight, .rows = kRows, .cols = kCols, .x_stride = kCols};
  large.y = data_.poisoned(static_cast<size_t>(kNumel) * 2);
  large.rstd = reinterpret_cast<float*>(data_.poisoned(kRows * 4));
  large.y_stride = kCols;
  large.dtype = DType::kBF16;
  NormArgs small = large;
  small.x = small_x;
  small.y = data_.poisoned(kTail * kCols * 2);
  small.rstd = reinterpret_cast<float*>(data_.poisoned(kTail * 4));
  small.rows = kTail;
  ops().norm_forward(queue(), large);
  ops().norm_forward(queue(), small);
  expect_tail(large.y, small.y, kCols);
  expect_tail(large.rstd, small.rstd, 1, 4);

  // In place: y becomes dy and then dx.
  NormBackwardArgs back{.dy = large.y, .x = x, .weight = weight, .rstd = large.rstd, .dx = large.y};
  back.rows = kRows;
  back.cols = back.x_stride = back.y_stride = kCols;
  back.dtype = DType::kBF16;
  back.dweight = data_.put(std::vector<float>(kCols));
  NormBackwardArgs small_back = back;
  small_back.dy = small_back.dx = small.y;
  small_back.x = small_x;
  small_back.rstd = small.rstd;
  small_back.rows = kTail;
  small_back.dweight = data_.put(std::vector<float>(kCols));
  ops().norm_backward(queue(), back);
  ops().norm_backward(queue(), small_back);
  expect_tail(back.dx, small_back.dx, kCols);
  for (const float value : data_.get<float>(back.dweight, kCols)) ASSERT_TRUE(std::isfinite(value));
}

TEST_F(GpuLarge, ActivationForwardAndBackward) {
  std::byte* in = data_.random_bf16(kNumel * 2, 3.0f, 3);
  std::byte* small_in = tail_copy(in, 2 * kCols);
  ActivationArgs large{.kind = Activation::kSwiGlu, .in = in, .rows = kRows, .width = kCols};
  large.dtype = DType::kBF16;
  large.out = data_.poisoned(static_cast<size_t>(kNumel) * 2);
  ActivationArgs small = large;
  small.in = small_in;
  small.out = data_.poisoned(kTail * kCols * 2);
  small.rows = kTail;
  ops().activation_forward(queue(), large);
  ops().activation_forward(queue(), small);
  expect_tail(large.out, small.out, kCols);
  large.dout = large.out;
  large.din = in;
  small.dout = small.out;
  small.din = small_in;
  ops().activation_backward(queue(), large);
  ops().activation_backward(queue(), small);
  expect_tail(large.din, small.din, 2 * kCols);
}

TEST_F(GpuLarge, RopeAndAdd) {
  constexpr int64_t kHeadDim = 128;
  std::byte* x = data_.random_bf16(kNumel, 2.0f, 4);
  std::byte* small_x = tail_copy(x, kCols);
  std::vector<int32_t> positions(kRows);
  for (int64_t i = 0; i < kRows; ++i)
    positions[static_cast<size_t>(i)] = static_cast<int32_t>(i % 2048);
  std::vector<float> table(2048 * kHeadDim);
  for (size_t i = 0; i < table.size(); ++i) {
    const double angle = static_cast<double>(i / 2) * 0.37;
    table[i] = static_cast<float>(i % 2 == 0 ? std::cos(angle) : std::sin(angle));
  }
  RopeArgs large{.x = x, .positions = data_.put(positions), .cos_sin = data_.put(table)};
  large.rows = kRows;
  large.heads = kCols / kHeadDim;
  large.head_dim = large.rotary_dim = kHeadDim;
  large.row_stride = kCols;
  large.dtype = DType::kBF16;
  RopeArgs small = large;
  small.x = small_x;
  small.positions = large.positions + (kRows - kTail);
  small.rows = kTail;
  ops().rope(queue(), large);
  ops().rope(queue(), small);
  expect_tail(x, small_x, kCols);

  std::byte* to = data_.random_bf16(kNumel, 1.0f, 5);
  std::byte* small_to = tail_copy(to, kCols);
  ops().add(queue(), to, x, kNumel, DType::kBF16);
  ops().add(queue(), small_to, small_x, kTail * kCols, DType::kBF16);
  expect_tail(to, small_to, kCols);
}

TEST_F(GpuLarge, EmbeddingForwardAndBackward) {
  constexpr int64_t kVocab = 1000;
  std::vector<int32_t> tokens(kRows);
  for (int64_t i = 0; i < kRows; ++i) {
    tokens[static_cast<size_t>(i)] = static_cast<int32_t>(i * 7919 % kVocab);
  }
  EmbeddingArgs large{.tokens = data_.put(tokens),
                      .table = data_.random_bf16(kVocab * kCols, 1, 6)};
  large.out = data_.poisoned(static_cast<size_t>(kNumel) * 2);
  large.rows = kRows;
  large.cols = kCols;
  large.vocab = kVocab;
  large.dtype = DType::kBF16;
  EmbeddingArgs small = large;
  small.tokens = large.tokens + (kRows - kTail);
  small.out = data_.poisoned(kTail * kCols * 2);
  small.rows = kTail;
  ops().embedding_forward(queue(), large);
  ops().embedding_forward(queue(), small);
  expect_tail(large.out, small.out, kCols);

  // Two runs: the very first and the very last row of dy.
  EmbeddingBackwardArgs back{.dy = large.out, .rows = kRows, .cols = kCols};
  back.dtable = data_.put(std::vector<float>(2 * kCols));
  back.sorted_rows = data_.put(std::vector<int32_t>{0, static_cast<int32_t>(kRows - 1)});
  back.run_begin = data_.put(std::vector<int32_t>{0, 1, 2});
  back.run_index = data_.put(std::vector<int32_t>{1, 0});
  back.runs = 2;
  back.dtype = DType::kBF16;
  ops().embedding_backward(queue(), back);
  const auto dtable = data_.get<float>(back.dtable, 2 * kCols);
  const auto first = data_.get<uint16_t>(large.out, kCols);
  const auto last =
      data_.get<uint16_t>(static_cast<std::byte*>(large.out) + (kRows - 1) * kCols * 2, kCols);
  for (size_t c = 0; c < kCols; ++c) {
    ASSERT_EQ(dtable[c], bf16_to_float(last[c])) << c;
    ASSERT_EQ(dtable[kCols + c], bf16_to_float(first[c])) << c;
  }
}

TEST_F(GpuLarge, CrossEntropy) {
  std::byte* logits = data_.random_bf16(kNumel, 4.0f, 7);
  std::byte* small_logits = tail_copy(logits, kCols);
  std::vector<int32_t> labels(kRows);
  for (int64_t i = 0; i < kRows; ++i) {
    labels[static_cast<size_t>(i)] = static_cast<int32_t>(i % 17 == 0 ? -100 : i * 31 % kCols);
  }
  CrossEntropyArgs large{.logits = logits, .labels = data_.put(labels)};
  large.loss = reinterpret_cast<float*>(data_.poisoned(kRows * 4));
  large.scale = data_.put(std::vector<float>{0.125f});
  large.rows = kRows;
  large.vocab = kCols;
  large.dtype = DType::kBF16;
  CrossEntropyArgs small = large;
  small.logits = small_logits;
  small.labels = large.labels + (kRows - kTail);
  small.loss = reinterpret_cast<float*>(data_.poisoned(kTail * 4));
  small.rows = kTail;
  ops().cross_entropy(queue(), large);
  ops().cross_entropy(queue(), small);
  expect_tail(large.loss, small.loss, 1, 4);
  expect_tail(logits, small_logits, kCols);
}

// m * n > 2^31 and lda * m > 2^31; the reference is the same product of the last rows alone, whose
// algorithm, and so whose last bit, may be another.
TEST_F(GpuLarge, Matmul) {
  constexpr int64_t kK = 4096;
  MatmulArgs large{.m = kRows, .n = kCols, .k = kK, .lda = kK, .ldb = kK, .ldc = kCols};
  large.a = data_.random_bf16(kRows * kK, 1.0f, 8);
  large.b = data_.random_bf16(kCols * kK, 1.0f, 9);
  large.c = data_.poisoned(static_cast<size_t>(kNumel) * 2);
  large.trans_b = true;
  large.in_dtype = large.out_dtype = DType::kBF16;
  MatmulArgs small = large;
  small.a = tail(large.a, kK);
  small.c = data_.poisoned(kTail * kCols * 2);
  small.m = kTail;
  ops().matmul(queue(), large);
  ops().matmul(queue(), small);
  const auto a = data_.get<uint16_t>(tail(large.c, kCols), kTail * kCols);
  const auto b = data_.get<uint16_t>(small.c, kTail * kCols);
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_NEAR(bf16_to_float(a[i]), bf16_to_float(b[i]),
                0.02 + 0.01 * std::abs(static_cast<double>(bf16_to_float(b[i]))))
        << i;
  }
}

}  // namespace

GpuEnvironment& gpu() { return *environment; }

}  // namespace orlop::test
