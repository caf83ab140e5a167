#include "host/host_backend.h"
#include "ops_suite.h"

namespace orlop::test {
namespace {

auto host_backend(bool reference, int threads) {
  return [=] {
    return make_host_backend(
        {.device_bytes = size_t{64} << 20, .threads = threads, .reference_ops = reference});
  };
}

INSTANTIATE_TEST_SUITE_P(Reference, OpsSuite,
                         testing::ValuesIn(ops_cases("reference", host_backend(true, 2))),
                         ops_case_name);
INSTANTIATE_TEST_SUITE_P(Host, OpsSuite,
                         testing::ValuesIn(ops_cases("host", host_backend(false, 2))),
                         ops_case_name);

// What a few operations that divide work unevenly leave behind, as bytes.
std::vector<uint8_t> bits_with_threads(int threads, DType dtype) {
  TestDevice device(host_backend(false, threads)());
  std::mt19937_64 random(11);
  const int64_t rows = 230, heads = 6, kv_heads = 2, width = 40, stride = (heads + 4) * width;
  const std::vector<int32_t> cu_seqlens = {0, 130, 137, 230};
  const void* qkv = device.put(random_values(random, rows * stride, dtype), dtype);
  const auto element = [&](const void* base, int64_t index) {
    return static_cast<const std::byte*>(base) + index * static_cast<int64_t>(dtype_bytes(dtype));
  };
  AttentionBackwardArgs back;
  AttentionArgs& args = back.forward;
  args.q = qkv, args.k = element(qkv, heads * width), args.v = element(qkv, 8 * width);
  args.out = device.poisoned(rows * heads * width, dtype);
  args.lse = static_cast<float*>(device.poisoned(rows * heads, DType::kF32));
  args.cu_seqlens = device.put_raw(cu_seqlens);
  args.cu_seqlens_host = cu_seqlens;
  args.rows = rows, args.heads = heads, args.kv_heads = kv_heads, args.head_dim = width;
  args.q_stride = args.kv_stride = stride;
  args.scale = 0.2f;
  args.dtype = dtype;
  args.workspace_bytes =
      device.ops().attention_workspace_bytes({rows, heads, kv_heads, width, 130, dtype, true});
  args.workspace = device.poisoned_bytes(args.workspace_bytes);
  device.ops().attention_forward(device.queue(), args);
  back.dout = device.put(random_values(random, rows * heads * width, dtype), dtype);
  back.dq = device.put(Values(static_cast<size_t>(rows * stride)), dtype);
  back.dk = const_cast<std::byte*>(element(back.dq, heads * width));
  back.dv = const_cast<std::byte*>(element(back.dq, 8 * width));
  device.ops().attention_backward(device.queue(), back);

  NormBackwardArgs norm;
  norm.dy = qkv, norm.x = back.dout;
  norm.weight = device.put(random_values(random, heads * width, dtype), dtype);
  norm.rstd = device.put_f32(random_values(random, rows, DType::kF32));
  norm.dx = device.poisoned(rows * heads * width, dtype);
  norm.dweight = device.put_f32(Values(static_cast<size_t>(heads * width)));
  norm.rows = rows, norm.cols = norm.x_stride = heads * width, norm.y_stride = stride;
  norm.dtype = dtype;
  device.ops().norm_backward(device.queue(), norm);
  float* dbias = device.put_f32(Values(static_cast<size_t>(stride)));
  device.ops().bias_backward(device.queue(), qkv, dbias, rows, stride, dtype);

  std::vector<uint8_t> bits;
  const auto append = [&](const void* data, int64_t numel, DType type) {
    const auto bytes =
        device.get_raw<uint8_t>(data, numel * static_cast<int64_t>(dtype_bytes(type)));
    bits.insert(bits.end(), bytes.begin(), bytes.end());
  };
  append(args.out, rows * heads * width, dtype);
  append(back.dq, rows * stride, dtype);
  append(norm.dx, rows * heads * width, dtype);
  append(norm.dweight, heads * width, DType::kF32);
  append(dbias, stride, DType::kF32);
  return bits;
}

TEST(HostOps, BitsDoNotDependOnTheThreads) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const std::vector<uint8_t> one = bits_with_threads(1, dtype);
    EXPECT_EQ(bits_with_threads(2, dtype), one);
    EXPECT_EQ(bits_with_threads(5, dtype), one);
  }
}

}  // namespace
}  // namespace orlop::test
