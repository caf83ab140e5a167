// Every operation of the CUDA backend at the shapes of two models, L3 (3072 wide, 24 heads over 8)
// and L7 (4096 wide, 32 heads), 8 sequences of 2048 tokens. Ceilings come from the same run: a
// large device copy for what moves memory, and for each matmul the fastest of cuBLASLt's first
// eight heuristics. Times are medians of device events; every operand is larger than the
// second-level cache.
//
//   bench_gpu_ops [part of a name]    only the lines whose name holds it

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/check.h"
#include "base/half.h"
#include "bench/support/huge_buffer.h"
#include "bench/support/samples.h"
#include "gpu/attention.h"
#include "gpu/attention_backend.h"
#include "gpu/cuda_backend.h"
#include "gpu/device_scope.h"

namespace orlop::bench {
namespace {

struct Model {
  const char* name;
  int64_t hidden, intermediate, heads, kv_heads;
};
constexpr Model kModels[] = {{"L3", 3072, 8192, 24, 8}, {"L7", 4096, 11008, 32, 32}};
constexpr int64_t kSequences = 8;
constexpr int64_t kLength = 2048;
constexpr int64_t kRows = kSequences * kLength;
constexpr int64_t kHeadDim = 128;
constexpr int64_t kVocab = 32000;
constexpr size_t kArenaBytes = 16 * kGiB;
constexpr size_t kHostBytes = kGiB;

class Bench {
 public:
  explicit Bench(std::string filter)
      : filter_(std::move(filter)),
        backend_({}),
        scope_(backend_.device()),
        arena_(static_cast<std::byte*>(backend_.allocate_arena(kArenaBytes))) {}

  void run() {
    const DeviceInfo info = backend_.info();
    fmt::print("{}, attention: {}, overhead {}\n", info.name, ops().attention_description(),
               format_bytes(info.overhead_bytes));
    measure_ceilings();
    for (const Model& model : kModels) {
      matmuls(model);
      attention(model);
      rows(model);
    }
    cross_entropy();
    optimizer(DType::kF32);
    optimizer(DType::kBF16);
    norm();
  }

 private:
  CudaOps& ops() { return backend_.cuda_ops(); }
  CudaQueue& queue() { return backend_.cuda_queue(QueueKind::kCompute); }
  bool wanted(const std::string& name) const { return name.find(filter_) != std::string::npos; }

  std::byte* take(size_t bytes) {
    std::byte* out = arena_ + used_;
    used_ = align_up(used_ + bytes, kDeviceAlignment);
    check(used_ <= kArenaBytes, ErrorCode::kDoesNotFit, "the bench's arena is too small");
    return out;
  }
  // Random values in (-1, 1) that repeat after about a million elements.
  std::byte* bf16(int64_t numel) {
    std::vector<uint16_t> period((1 << 20) + 7);
    for (uint16_t& value : period) {
      state_ = state_ * 6364136223846793005u + 1442695040888963407u;
      value = float_to_bf16(static_cast<float>(state_ >> 40) * 0x1p-23f - 1.0f);
    }
    return filled(period, static_cast<size_t>(numel) * 2);
  }
  float* fp32(int64_t numel) {
    std::vector<float> period((1 << 20) + 7);
    for (float& value : period) {
      state_ = state_ * 6364136223846793005u + 1442695040888963407u;
      value = static_cast<float>(state_ >> 40) * 0x1p-24f;
    }
    return reinterpret_cast<float*>(filled(period, static_cast<size_t>(numel) * 4));
  }
  template <typename T>
  std::byte* filled(const std::vector<T>& period, size_t bytes) {
    std::byte* out = take(bytes);
    const size_t period_bytes = std::min(period.size() * sizeof(T), bytes);
    queue().upload(out, period.data(), period_bytes);
    for (size_t done = period_bytes; done < bytes;) {
      const size_t part = std::min(done, bytes - done);
      queue().copy_on_device(out + done, out, part);
      done += part;
    }
    queue().synchronize();
    return out;
  }
  template <typename T>
  T* put(const std::vector<T>& host) {
    std::byte* out = take(host.size() * sizeof(T));
    queue().upload(out, host.data(), host.size() * sizeof(T));
    queue().synchronize();
    return reinterpret_cast<T*>(out);
  }

  // Milliseconds of one call on the compute queue.
  Summary time(const std::function<void()>& issue) {
    constexpr int kRepeats = 9;
    const CudaEventHandle begin(cudaEventDefault);
    const CudaEventHandle end(cudaEventDefault);
    issue();
    issue();
    std::vector<double> samples;
    for (int i = 0; i < kRepeats; ++i) {
      ORLOP_CUDA(cudaEventRecord(begin.get(), queue().stream()));
      issue();
      ORLOP_CUDA(cudaEventRecord(end.get(), queue().stream()));
      ORLOP_CUDA(cudaEventSynchronize(end.get()));
      float ms = 0;
      ORLOP_CUDA(cudaEventElapsedTime(&ms, begin.get(), end.get()));
      samples.push_back(static_cast<double>(ms));
    }
    return summarize(samples);
  }

  void print_bytes(const std::string& name, double bytes, const std::function<void()>& issue) {
    if (!wanted(name)) return;
    const Summary ms = time(issue);
    const double gb_per_s = bytes / ms.median / 1e6;
    fmt::print("{:34} {:8.3f} ms ({:4.1f} %) {:8.0f} GB/s, {:4.2f} of a copy\n", name, ms.median,
               100 * ms.spread(), gb_per_s, gb_per_s / copy_gb_per_s_);
    std::fflush(stdout);
  }
  void print_flops(const std::string& name, double flops, const std::function<void()>& issue) {
    if (!wanted(name)) return;
    const Summary ms = time(issue);
    fmt::print("{:34} {:8.3f} ms ({:4.1f} %) {:8.0f} TFLOPS\n", name, ms.median, 100 * ms.spread(),
               flops / ms.median / 1e9);
    std::fflush(stdout);
  }

  void measure_ceilings();
  void matmul(const std::string& name, const MatmulArgs& args);
  void linear(const std::string& name, int64_t n, int64_t k, int64_t m);
  void matmuls(const Model& model);
  void attention(const Model& model);
  void rows(const Model& model);
  void cross_entropy();
  void optimizer(DType moment);
  void norm();

  std::string filter_;
  HugeBuffer host_{kHostBytes, 8};  // outlives its registration
  CudaBackend backend_;
  DeviceScope scope_;
  std::byte* arena_;
  size_t used_ = 0;
  uint64_t state_ = 42;
  double copy_gb_per_s_ = 0;
};

void Bench::measure_ceilings() {
  used_ = 0;
  constexpr int64_t kNumel = int64_t{1} << 30;
  const std::byte* from = bf16(kNumel);
  std::byte* to = take(kNumel * 2);
  const Summary copy = time([&] { queue().copy_on_device(to, from, kNumel * 2); });
  copy_gb_per_s_ = 2.0 * kNumel * 2 / copy.median / 1e6;
  fmt::print("{:34} {:8.3f} ms ({:4.1f} %) {:8.0f} GB/s read and written\n", "ceiling: device copy",
             copy.median, 100 * copy.spread(), copy_gb_per_s_);
  backend_.register_host_memory(host_.as<void>(), kHostBytes);
  const Summary up = time([&] { queue().upload(to, host_.as<void>(), kHostBytes); });
  const Summary down = time([&] { queue().offload(host_.as<void>(), to, kHostBytes); });
  fmt::print("{:34} upload {:.1f} GB/s, offload {:.1f} GB/s\n", "ceiling: link",
             kHostBytes / up.median / 1e6, kHostBytes / down.median / 1e6);
  constexpr int64_t kSide = 8192;
  matmul("ceiling: 8192^3", {.a = from,
                             .b = from + kSide * kSide * 2,
                             .c = to,
                             .m = kSide,
                             .n = kSide,
                             .k = kSide,
                             .lda = kSide,
                             .ldb = kSide,
                             .ldc = kSide,
                             .trans_b = true,
                             .in_dtype = DType::kBF16,
                             .out_dtype = DType::kBF16});
}

void Bench::matmul(const std::string& name, const MatmulArgs& args) {
  if (!wanted(name)) return;
  const Summary ms = time([&] { ops().matmul(queue(), args); });
  const std::vector<float> candidates = ops().cublas().time_candidates(queue(), args);
  const auto best = std::min_element(candidates.begin(), candidates.end());
  const double flops =
      2.0 * static_cast<double>(args.m) * static_cast<double>(args.n) * static_cast<double>(args.k);
  fmt::print("{:34} {:8.3f} ms ({:4.1f} %) {:8.0f} TFLOPS", name, ms.median, 100 * ms.spread(),
             flops / ms.median / 1e9);
  if (best == candidates.end()) {
    fmt::print(", cuBLASLt has no algorithm\n");
  } else {
    fmt::print(", chosen {:.3f}, best of {} is {:.3f}: {:.2f} of it\n", candidates.front(),
               candidates.size(), *best, *best / candidates.front());
  }
  std::fflush(stdout);
}

// y = x w^T with x (m, k) and w (n, k): forward, dx and the accumulated dw.
void Bench::linear(const std::string& name, int64_t n, int64_t k, int64_t m) {
  if (!wanted(name)) return;
  used_ = 0;
  const void* x = bf16(m * k);
  const void* w = bf16(n * k);
  void* y = bf16(m * n);
  void* dx = take(static_cast<size_t>(m * k) * 2);
  float* dw = fp32(n * k);
  MatmulArgs forward{.a = x, .b = w, .c = y, .m = m, .n = n, .k = k, .lda = k, .ldb = k, .ldc = n};
  forward.trans_b = true;
  forward.in_dtype = forward.out_dtype = DType::kBF16;
  MatmulArgs dx_args{.a = y, .b = w, .c = dx, .m = m, .n = k, .k = n, .lda = n, .ldb = k, .ldc = k};
  dx_args.in_dtype = dx_args.out_dtype = DType::kBF16;
  MatmulArgs dw_args{.a = y, .b = x, .c = dw, .m = n, .n = k, .k = m, .lda = n, .ldb = k, .ldc = k};
  dw_args.trans_a = dw_args.accumulate = true;
  dw_args.in_dtype = DType::kBF16;
  MatmulArgs dw_half = dw_args;
  dw_half.accumulate = false;
  dw_half.out_dtype = DType::kBF16;
  matmul(name + " forward", forward);
  matmul(name + " dx", dx_args);
  matmul(name + " dw, += fp32", dw_args);
  matmul(name + " dw, = bf16 (not used)", dw_half);
}

void Bench::matmuls(const Model& model) {
  const std::string name = model.name;
  const int64_t q = model.heads * kHeadDim;
  const int64_t kv = model.kv_heads * kHeadDim;
  linear(name + " qkv", q + 2 * kv, model.hidden, kRows);
  linear(name + " attention out", model.hidden, q, kRows);
  linear(name + " gate and up", 2 * model.intermediate, model.hidden, kRows);
  linear(name + " down", model.hidden, model.intermediate, kRows);
  linear(name + " head", kVocab, model.hidden, ops().head_chunk_rows(kVocab, DType::kBF16));
}

void Bench::attention(const Model& model) {
  used_ = 0;
  std::vector<int32_t> offsets;
  for (int64_t i = 0; i <= kSequences; ++i) offsets.push_back(static_cast<int32_t>(i * kLength));
  const int64_t stride = (model.heads + 2 * model.kv_heads) * kHeadDim;
  const int64_t width = model.heads * kHeadDim;
  std::byte* qkv = bf16(kRows * stride);
  std::byte* gradient = take(static_cast<size_t>(kRows * stride) * 2);
  AttentionBackwardArgs args;
  args.forward.q = qkv;
  args.forward.k = qkv + width * 2;
  args.forward.v = qkv + (width + model.kv_heads * kHeadDim) * 2;
  args.forward.out = take(static_cast<size_t>(kRows * width) * 2);
  args.forward.lse = reinterpret_cast<float*>(take(static_cast<size_t>(kRows * model.heads) * 4));
  args.forward.cu_seqlens = put(offsets);
  args.forward.cu_seqlens_host = offsets;
  args.forward.rows = kRows;
  args.forward.heads = model.heads;
  args.forward.kv_heads = model.kv_heads;
  args.forward.head_dim = kHeadDim;
  args.forward.q_stride = args.forward.kv_stride = stride;
  args.forward.scale = 1.0f / std::sqrt(static_cast<float>(kHeadDim));
  args.forward.dtype = DType::kBF16;
  args.dout = bf16(kRows * width);
  args.dq = gradient;
  args.dk = gradient + width * 2;
  args.dv = gradient + (width + model.kv_heads * kHeadDim) * 2;
  // Half of the score matrix, two products forward and five backward.
  const double product =
      2.0 * kSequences * static_cast<double>(model.heads) * kLength * kLength * kHeadDim / 2;
  const size_t mark = used_;
  for (const bool deterministic : {true, false}) {
    used_ = mark;
    Attention attention(make_cudnn_attention(deterministic));
    AttentionShape shape{kRows,   model.heads,  model.kv_heads, kHeadDim,
                         kLength, DType::kBF16, false};
    args.forward.workspace_bytes = attention.workspace_bytes(shape);
    shape.backward = true;
    const size_t backward_bytes = attention.workspace_bytes(shape);
    args.forward.workspace_bytes = std::max(args.forward.workspace_bytes, backward_bytes);
    args.forward.workspace = take(args.forward.workspace_bytes);
    const std::string name = std::string(model.name) + " attention";
    if (deterministic) {
      print_flops(name + " forward", 2 * product,
                  [&] { attention.forward(queue(), args.forward); });
    }
    print_flops(name + (deterministic ? " backward" : " backward, not deterministic"), 5 * product,
                [&] { attention.backward(queue(), args); });
    if (wanted(name)) {
      fmt::print("{:34} workspace {}\n", "", format_bytes(backward_bytes));
    }
    queue().synchronize();
  }
}

void Bench::rows(const Model& model) {
  used_ = 0;
  const std::string name = model.name;
  const int64_t hidden = model.hidden;
  const double row_bytes = static_cast<double>(kRows * hidden) * 2;
  NormArgs norm{.x = bf16(kRows * hidden), .weight = bf16(hidden)};
  norm.residual = bf16(kRows * hidden);
  norm.y = take(static_cast<size_t>(kRows * hidden) * 2);
  norm.rstd = fp32(kRows);
  norm.rows = kRows;
  norm.cols = norm.x_stride = norm.y_stride = hidden;
  norm.dtype = DType::kBF16;
  print_bytes(name + " rmsnorm + residual", 4 * row_bytes,
              [&] { ops().norm_forward(queue(), norm); });
  norm.residual = nullptr;
  print_bytes(name + " rmsnorm", 2 * row_bytes, [&] { ops().norm_forward(queue(), norm); });
  NormBackwardArgs back{.dy = norm.y, .x = norm.x, .weight = norm.weight, .rstd = norm.rstd};
  back.dx = bf16(kRows * hidden);
  back.dweight = fp32(hidden);
  back.accumulate_dx = true;
  back.rows = kRows;
  back.cols = back.x_stride = back.y_stride = hidden;
  back.dtype = DType::kBF16;
  print_bytes(name + " rmsnorm backward (+= dx)", 4 * row_bytes,
              [&] { ops().norm_backward(queue(), back); });
  print_bytes(name + " add", 3 * row_bytes,
              [&] { ops().add(queue(), norm.x, norm.y, kRows * hidden, DType::kBF16); });
  print_bytes(name + " bias backward", row_bytes, [&] {
    ops().bias_backward(queue(), norm.y, back.dweight, kRows, hidden, DType::kBF16);
  });

  const int64_t width = model.intermediate;
  const double activation_bytes = static_cast<double>(kRows * width) * 2;
  ActivationArgs activation{.kind = Activation::kSwiGlu, .in = bf16(kRows * 2 * width)};
  activation.out = bf16(kRows * width);
  activation.rows = kRows;
  activation.width = width;
  activation.dtype = DType::kBF16;
  print_bytes(name + " swiglu", 3 * activation_bytes,
              [&] { ops().activation_forward(queue(), activation); });
  activation.dout = activation.out;
  activation.din = take(static_cast<size_t>(kRows * 2 * width) * 2);
  print_bytes(name + " swiglu backward", 5 * activation_bytes,
              [&] { ops().activation_backward(queue(), activation); });

  const int64_t rope_heads = model.heads + model.kv_heads;
  const int64_t stride = rope_heads * kHeadDim + model.kv_heads * kHeadDim;
  std::vector<int32_t> positions(kRows);
  for (size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<int32_t>(i % kLength);
  RopeArgs rope{.x = bf16(kRows * stride), .positions = put(positions)};
  rope.cos_sin = fp32(kLength * kHeadDim);
  rope.rows = kRows;
  rope.heads = rope_heads;
  rope.head_dim = rope.rotary_dim = kHeadDim;
  rope.row_stride = stride;
  rope.dtype = DType::kBF16;
  print_bytes(name + " rope of q and k", 4.0 * static_cast<double>(kRows * rope_heads * kHeadDim),
              [&] { ops().rope(queue(), rope); });

  std::vector<int32_t> tokens(kRows);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i * 7919 % kVocab);
  EmbeddingArgs embedding{.tokens = put(tokens), .table = bf16(kVocab * hidden)};
  embedding.out = norm.y;
  embedding.rows = kRows;
  embedding.cols = hidden;
  embedding.vocab = kVocab;
  embedding.dtype = DType::kBF16;
  print_bytes(name + " embedding", 2 * row_bytes,
              [&] { ops().embedding_forward(queue(), embedding); });
}

void Bench::cross_entropy() {
  used_ = 0;
  const int64_t rows = ops().head_chunk_rows(kVocab, DType::kBF16);
  std::vector<int32_t> labels(static_cast<size_t>(rows));
  for (size_t i = 0; i < labels.size(); ++i) labels[i] = static_cast<int32_t>(i * 31 % kVocab);
  CrossEntropyArgs args{.logits = bf16(rows * kVocab), .labels = put(labels), .loss = fp32(rows)};
  args.scale = put(std::vector<float>{1.0f / static_cast<float>(rows)});
  args.rows = rows;
  args.vocab = kVocab;
  args.dtype = DType::kBF16;
  print_bytes("cross-entropy with gradient", 4.0 * static_cast<double>(rows * kVocab),
              [&] { ops().cross_entropy(queue(), args); });
}

void Bench::optimizer(DType moment) {
  used_ = 0;
  constexpr int64_t kNumel = int64_t{1} << 28;
  const std::string name = fmt::format("adam, split master, {} moments", dtype_name(moment));
  if (!wanted(name)) return;
  const auto plane = [&] {
    return moment == DType::kF32 ? static_cast<void*>(fp32(kNumel))
                                 : static_cast<void*>(bf16(kNumel));
  };
  DeviceAdamArgs args;
  args.shard.param = bf16(kNumel);
  args.shard.lo = reinterpret_cast<uint16_t*>(bf16(kNumel));
  args.shard.grad = bf16(kNumel);
  args.shard.exp_avg = plane();
  args.shard.exp_avg_sq = plane();
  if (moment == DType::kBF16)
    queue().fill_zero(args.shard.exp_avg_sq, kNumel * 2);  // never negative
  StepScalars scalars;
  args.scalars = put(std::vector<StepScalars>{scalars});
  args.shard.numel = kNumel;
  args.shard.moment_dtype = moment;
  args.hyper.lr = 1e-4;
  args.hyper.beta1 = 0.9;
  args.hyper.beta2 = 0.95;
  args.hyper.eps = 1e-8;
  const double bytes =
      static_cast<double>(kNumel) * (2 * 4 + 2 + 4 * static_cast<double>(dtype_bytes(moment)));
  const Summary ms = time([&] { ops().device_adam(queue(), args); });
  fmt::print("{:34} {:8.3f} ms ({:4.1f} %) {:8.1f} Gparam/s, {:4.2f} of a copy\n", name, ms.median,
             100 * ms.spread(), kNumel / ms.median / 1e6, bytes / ms.median / 1e6 / copy_gb_per_s_);
}

void Bench::norm() {
  used_ = 0;
  constexpr int64_t kNumel = int64_t{1} << 28;
  RoundGradArgs args;
  args.grad = fp32(kNumel);
  args.rounded = take(kNumel * 2);
  args.square_sum = reinterpret_cast<double*>(take(8));
  args.first_nonfinite = reinterpret_cast<int64_t*>(take(8));
  args.scratch = take(ops().grad_norm_scratch_bytes(kNumel));
  args.numel = kNumel;
  args.out_dtype = DType::kBF16;
  print_bytes("round gradient to bf16, norm", 6.0 * kNumel,
              [&] { ops().round_grad(queue(), args); });
}

}  // namespace
}  // namespace orlop::bench

int main(int argc, char** argv) {
  try {
    orlop::bench::Bench(argc > 1 ? argv[1] : "").run();
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "bench_gpu_ops: {}\n", error.what());
    return 1;
  }
}
