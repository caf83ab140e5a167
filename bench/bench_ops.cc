// Every operation of the host backend at the shapes of one transformer layer, beside the ceilings
// of the same run: GFLOP/s of an in-cache product for what multiplies, bytes per second of an
// in-place scale for what moves memory. Ceilings are measured next to each operation, in turns.

#include <fmt/format.h>

#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "backend/ops.h"
#include "base/bytes.h"
#include "base/check.h"
#include "bench/support/huge_buffer.h"
#include "bench/support/memory_ceiling.h"
#include "bench/support/samples.h"
#include "cpu_adam/adam.h"
#include "cpu_adam/cpu_features.h"
#include "host/host_backend.h"
#include "host/kernels.h"
#include "host/parallel.h"

namespace orlop::bench {
namespace {

struct Options {
  DType dtype = DType::kBF16;
  int64_t rows = 1024, sequence = 512;
  int64_t hidden = 576, intermediate = 1536, heads = 9, kv_heads = 3, head_dim = 64, vocab = 49152;
  int threads = default_threads();
  int repeats = 7;
  std::string filter;
};

// Product of two blocks that stay in the caches of each core: what the multipliers give without
// memory.
class ComputeCeiling {
 public:
  explicit ComputeCeiling(int threads)
      : threads_(threads), buffer_(kFloats * sizeof(float), threads) {}

  double flops_per_s() {
    const host::KernelSet& set = active_isa() == Isa::kAvx512 ? host::kAvx512Kernels
                                 : active_isa() == Isa::kAvx2 ? host::kAvx2Kernels
                                                              : host::kBaselineKernels;
    const double seconds = seconds_of([&] {
      host::parallel_for(threads_, threads_, [&](int64_t) {
        alignas(64) float sums[kM * kN];
        const float* a = buffer_.as<float>();
        for (int i = 0; i < kRounds; ++i) {
          set.block_product({a, a + kM * kK, sums, kM, kN, kK, kK, 1, kN, kN, false});
        }
      });
    });
    return 2.0 * kM * kN * kK * kRounds * threads_ / seconds;
  }

 private:
  static constexpr int64_t kM = 48, kN = 64, kK = 96;
  static constexpr int64_t kFloats = kM * kK + kK * kN;
  static constexpr int kRounds = 4000;
  const int threads_;
  HugeBuffer buffer_;
};

// What is timed: the call, and what it must move or multiply at least.
struct Case {
  std::string name;
  std::function<void()> issue;
  double flops = 0;
  double bytes = 0;  // every operand once
};

class OpsBench {
 public:
  explicit OpsBench(const Options& options)
      : o_(options),
        element_(static_cast<double>(dtype_bytes(options.dtype))),
        backend_(make_host_backend({.device_bytes = kDeviceBytes, .threads = options.threads})),
        arena_(static_cast<std::byte*>(backend_->allocate_arena(kArenaBytes))),
        compute_(options.threads),
        memory_(256 * kMiB, options.threads) {}

  void run() {
    add_matmuls();
    add_rows();
    add_attention();
    add_head_and_embedding();
    fmt::print("{:26} {:>9} {:>7} {:>9} {:>9} {:>9} {:>7}\n", "operation", "ms", "spread",
               "GFLOP/s", "GB/s", "ceiling", "of it");
    for (const Case& c : cases_) {
      if (c.name.find(o_.filter) != std::string::npos) measure(c);
    }
  }

 private:
  static constexpr size_t kArenaBytes = 3 * kGiB / 2;
  static constexpr size_t kDeviceBytes = kArenaBytes + 64 * kMiB;

  Ops& ops() { return backend_->ops(); }
  Queue& queue() { return backend_->queue(QueueKind::kCompute); }
  double now(double elements) const { return elements * element_; }

  void* take(size_t bytes) {
    void* at = arena_ + used_;
    used_ = align_up(used_ + bytes, kDeviceAlignment);
    ORLOP_INVARIANT(used_ <= kArenaBytes);
    return at;
  }

  // Small values of changing sign, so that nothing overflows or becomes subnormal.
  void* tensor(int64_t numel, DType dtype) {
    void* data = take(static_cast<size_t>(numel) * dtype_bytes(dtype));
    for (int64_t i = 0; i < numel; ++i) {
      const float value = 0.01f * static_cast<float>(i * 7919 % 201 - 100);
      if (dtype == DType::kF32) {
        static_cast<float*>(data)[i] = value;
      } else {
        const auto& set = host::kBaselineKernels;
        const auto& kernels = dtype == DType::kF16 ? set.f16 : set.bf16;
        kernels.narrow(&value, static_cast<uint16_t*>(data) + i, 1);
      }
    }
    return data;
  }
  void* tensor(int64_t numel) { return tensor(numel, o_.dtype); }
  float* sums(int64_t numel) { return static_cast<float*>(tensor(numel, DType::kF32)); }

  // The three products of y = x w^T with w (n, k): forward, dx and dw.
  void add_linear(const std::string& name, int64_t m, int64_t n, int64_t k) {
    const void* x = tensor(m * k);
    const void* w = tensor(n * k);
    void* y = tensor(m * n);
    void* dx = tensor(m * k);
    float* dw = sums(n * k);
    const double flops = 2.0 * static_cast<double>(m * n) * static_cast<double>(k);
    const double bytes = now(static_cast<double>(m * k + n * k + m * n));
    const auto add = [&](const char* suffix, const MatmulArgs& args) {
      cases_.push_back(
          {name + suffix, [this, args] { ops().matmul(queue(), args); }, flops, bytes});
    };
    MatmulArgs args;
    args.in_dtype = args.out_dtype = o_.dtype;
    args.a = x, args.b = w, args.c = y, args.m = m, args.n = n, args.k = k;
    args.lda = k, args.ldb = k, args.ldc = n, args.trans_b = true;
    add(" forward", args);
    args.a = y, args.b = w, args.c = dx, args.m = m, args.n = k, args.k = n;
    args.lda = n, args.ldb = k, args.ldc = k, args.trans_b = false;
    add(" dx", args);
    args.a = y, args.b = x, args.c = dw, args.m = n, args.n = k, args.k = m;
    args.lda = n, args.ldb = k, args.ldc = k, args.trans_a = true;
    args.out_dtype = DType::kF32, args.accumulate = true;
    add(" dw", args);
  }

  int64_t qkv_width() const { return (o_.heads + 2 * o_.kv_heads) * o_.head_dim; }

  void add_matmuls() {
    add_linear("qkv", o_.rows, qkv_width(), o_.hidden);
    add_linear("attention out", o_.rows, o_.hidden, o_.heads * o_.head_dim);
    add_linear("gate up", o_.rows, 2 * o_.intermediate, o_.hidden);
    add_linear("down", o_.rows, o_.hidden, o_.intermediate);
    add_linear("head chunk", ops().head_chunk_rows(o_.vocab, o_.dtype), o_.vocab, o_.hidden);
  }

  void add_rows() {
    const auto cells = static_cast<double>(o_.rows * o_.hidden);
    NormArgs norm;
    norm.x = tensor(o_.rows * o_.hidden);
    norm.weight = tensor(o_.hidden);
    norm.y = tensor(o_.rows * o_.hidden);
    norm.rstd = sums(o_.rows);
    norm.rows = o_.rows, norm.cols = norm.x_stride = norm.y_stride = o_.hidden;
    norm.dtype = o_.dtype;
    cases_.push_back(
        {"norm forward", [this, norm] { ops().norm_forward(queue(), norm); }, 0, now(2 * cells)});
    NormBackwardArgs back;
    back.dy = norm.y, back.x = norm.x, back.weight = norm.weight, back.rstd = norm.rstd;
    back.dx = tensor(o_.rows * o_.hidden);
    back.dweight = sums(o_.hidden);
    back.rows = o_.rows, back.cols = back.x_stride = back.y_stride = o_.hidden;
    back.dtype = o_.dtype;
    cases_.push_back(
        {"norm backward", [this, back] { ops().norm_backward(queue(), back); }, 0, now(3 * cells)});

    ActivationArgs act;
    act.in = tensor(o_.rows * 2 * o_.intermediate);
    act.out = tensor(o_.rows * o_.intermediate);
    act.dout = tensor(o_.rows * o_.intermediate);
    act.din = tensor(o_.rows * 2 * o_.intermediate);
    act.rows = o_.rows, act.width = o_.intermediate, act.dtype = o_.dtype;
    const auto inner = static_cast<double>(o_.rows * o_.intermediate);
    cases_.push_back({"swiglu forward", [this, act] { ops().activation_forward(queue(), act); }, 0,
                      now(3 * inner)});
    cases_.push_back({"swiglu backward", [this, act] { ops().activation_backward(queue(), act); },
                      0, now(5 * inner)});

    cases_.push_back({"add",
                      [this, to = tensor(o_.rows * o_.hidden), from = norm.x] {
                        ops().add(queue(), to, from, o_.rows * o_.hidden, o_.dtype);
                      },
                      0, now(3 * cells)});
    add_round_grad();
  }

  void add_round_grad() {
    const int64_t numel = 4 * o_.hidden * o_.intermediate;
    RoundGradArgs round;
    round.grad = sums(numel);
    round.rounded = o_.dtype == DType::kF32 ? nullptr : tensor(numel);
    round.square_sum = static_cast<double*>(take(8));
    round.first_nonfinite = static_cast<int64_t*>(take(8));
    round.scratch = take(ops().grad_norm_scratch_bytes(numel));
    round.numel = numel, round.out_dtype = o_.dtype;
    const double per_element = o_.dtype == DType::kF32 ? 4 : 8;  // read, write, read again
    cases_.push_back({"round grad", [this, round] { ops().round_grad(queue(), round); }, 0,
                      per_element * static_cast<double>(numel)});
  }

  void add_attention() {
    const int64_t sequences = o_.rows / o_.sequence;
    cu_seqlens_.clear();
    for (int64_t s = 0; s <= sequences; ++s) {
      cu_seqlens_.push_back(static_cast<int32_t>(s * o_.sequence));
    }
    const int64_t rows = sequences * o_.sequence;
    AttentionArgs args;
    args.q = tensor(rows * qkv_width());
    args.k = static_cast<const std::byte*>(args.q) +
             static_cast<size_t>(o_.heads * o_.head_dim) * dtype_bytes(o_.dtype);
    args.v = static_cast<const std::byte*>(args.k) +
             static_cast<size_t>(o_.kv_heads * o_.head_dim) * dtype_bytes(o_.dtype);
    args.out = tensor(rows * o_.heads * o_.head_dim);
    args.lse = sums(rows * o_.heads);
    args.cu_seqlens = cu_seqlens_.data();
    args.cu_seqlens_host = cu_seqlens_;
    args.rows = rows, args.heads = o_.heads, args.kv_heads = o_.kv_heads;
    args.head_dim = o_.head_dim;
    args.q_stride = args.kv_stride = qkv_width();
    args.scale = 1.0f / std::sqrt(static_cast<float>(o_.head_dim));
    args.dtype = o_.dtype;
    args.workspace_bytes = ops().attention_workspace_bytes(
        {rows, o_.heads, o_.kv_heads, o_.head_dim, o_.sequence, o_.dtype, true});
    args.workspace = take(args.workspace_bytes);
    AttentionBackwardArgs back;
    back.forward = args;
    back.dout = tensor(rows * o_.heads * o_.head_dim);
    back.dq = tensor(rows * qkv_width());
    back.dk = static_cast<std::byte*>(back.dq) +
              static_cast<size_t>(o_.heads * o_.head_dim) * dtype_bytes(o_.dtype);
    back.dv = static_cast<std::byte*>(back.dk) +
              static_cast<size_t>(o_.kv_heads * o_.head_dim) * dtype_bytes(o_.dtype);
    // Half of the square is visible; two products forward, five backward.
    const double pairs = 0.5 * static_cast<double>(sequences * o_.sequence * (o_.sequence + 1)) *
                         static_cast<double>(o_.heads * o_.head_dim);
    cases_.push_back({"attention forward", [this, args] { ops().attention_forward(queue(), args); },
                      4 * pairs, 0});
    cases_.push_back({"attention backward",
                      [this, back] { ops().attention_backward(queue(), back); }, 10 * pairs, 0});

    positions_.resize(static_cast<size_t>(rows));
    for (size_t r = 0; r < positions_.size(); ++r) {
      positions_[r] = static_cast<int32_t>(static_cast<int64_t>(r) % o_.sequence);
    }
    RopeArgs rope;
    rope.x = tensor(rows * qkv_width());
    rope.positions = positions_.data();
    rope.cos_sin = sums(o_.sequence * o_.head_dim);
    rope.rows = rows, rope.heads = o_.heads + o_.kv_heads, rope.head_dim = o_.head_dim;
    rope.rotary_dim = o_.head_dim, rope.row_stride = qkv_width();
    rope.dtype = o_.dtype;
    cases_.push_back({"rope", [this, rope] { ops().rope(queue(), rope); }, 0,
                      now(2.0 * static_cast<double>(rows * rope.heads * o_.head_dim))});
  }

  void add_head_and_embedding() {
    CrossEntropyArgs loss;
    loss.rows = ops().head_chunk_rows(o_.vocab, o_.dtype), loss.vocab = o_.vocab;
    loss.logits = tensor(loss.rows * o_.vocab);
    labels_.assign(static_cast<size_t>(loss.rows), 17);
    loss.labels = labels_.data();
    loss.loss = sums(loss.rows);
    scale_ = 1e-3f;
    loss.scale = &scale_;
    loss.dtype = o_.dtype;
    cases_.push_back({"cross entropy chunk", [this, loss] { ops().cross_entropy(queue(), loss); },
                      0, now(2.0 * static_cast<double>(loss.rows * o_.vocab))});

    for (int64_t r = 0; r < o_.rows; ++r) {
      tokens_.push_back(static_cast<int32_t>(r * 37 % o_.vocab));
      sorted_rows_.push_back(static_cast<int32_t>(r));
      run_begin_.push_back(static_cast<int32_t>(r));
    }
    run_begin_.push_back(static_cast<int32_t>(o_.rows));
    EmbeddingArgs embedding;
    embedding.tokens = tokens_.data();
    embedding.table = tensor(o_.vocab * o_.hidden);
    embedding.out = tensor(o_.rows * o_.hidden);
    embedding.rows = o_.rows, embedding.cols = o_.hidden, embedding.vocab = o_.vocab;
    embedding.dtype = o_.dtype;
    const auto cells = static_cast<double>(o_.rows * o_.hidden);
    cases_.push_back({"embedding forward",
                      [this, embedding] { ops().embedding_forward(queue(), embedding); }, 0,
                      now(2 * cells)});
    EmbeddingBackwardArgs back;
    back.dy = embedding.out;
    back.dtable = sums(o_.vocab * o_.hidden);
    back.sorted_rows = sorted_rows_.data();
    back.run_begin = run_begin_.data();
    back.run_index = tokens_.data();
    back.runs = back.rows = o_.rows;
    back.cols = o_.hidden, back.dtype = o_.dtype;
    cases_.push_back({"embedding backward",
                      [this, back] { ops().embedding_backward(queue(), back); }, 0,
                      now(cells) + 8 * cells});
  }

  void measure(const Case& c) {
    const auto once = [&] {
      c.issue();
      queue().synchronize();
    };
    once();  // primitives are made, pages are touched
    std::vector<double> seconds, rates, ceilings, shares;
    for (int i = 0; i < o_.repeats; ++i) {
      ceilings.push_back(c.flops > 0 ? compute_.flops_per_s() : memory_.bytes_per_s());
      seconds.push_back(seconds_of(once));
      shares.push_back((c.flops > 0 ? c.flops : c.bytes) / seconds.back() / ceilings.back());
    }
    const Summary time = summarize(seconds);
    const auto rate = [&](double amount) {
      return amount > 0 ? fmt::format("{:.1f}", amount / time.median * 1e-9) : std::string("-");
    };
    fmt::print("{:26} {:9.3f} {:6.0f}% {:>9} {:>9} {:9.1f} {:6.0f}%\n", c.name, time.median * 1e3,
               time.spread() * 100, rate(c.flops), rate(c.bytes), summarize(ceilings).median * 1e-9,
               summarize(shares).median * 100);
    std::fflush(stdout);
  }

  const Options o_;
  const double element_;
  std::vector<int32_t> cu_seqlens_, positions_, labels_, tokens_, sorted_rows_, run_begin_;
  float scale_ = 0;
  std::unique_ptr<Backend> backend_;
  std::byte* arena_;
  size_t used_ = 0;
  ComputeCeiling compute_;
  MemoryCeiling memory_;
  std::vector<Case> cases_;
};

int64_t parse_count(std::string_view text) {
  const int64_t value = std::atoll(std::string(text).c_str());
  check(value > 0, ErrorCode::kUsage, "bench_ops: '{}' is not a positive number", text);
  return value;
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view name = argv[i], value = argv[i + 1];
    if (name == "--dtype") {
      check(value == "fp32" || value == "bf16" || value == "fp16", ErrorCode::kUsage,
            "bench_ops: --dtype is fp32, bf16 or fp16, not '{}'", value);
      options.dtype = value == "fp32" ? DType::kF32 : value == "bf16" ? DType::kBF16 : DType::kF16;
    } else if (name == "--rows") {
      options.rows = parse_count(value);
    } else if (name == "--sequence") {
      options.sequence = parse_count(value);
    } else if (name == "--threads") {
      options.threads = static_cast<int>(parse_count(value));
    } else if (name == "--repeats") {
      options.repeats = static_cast<int>(parse_count(value));
    } else if (name == "--filter") {
      options.filter = value;
    } else {
      fail(
          ErrorCode::kUsage,
          "bench_ops: unknown option '{}'; there are --dtype --rows --sequence --threads --repeats "
          "--filter",
          name);
    }
  }
  check(options.rows >= options.sequence, ErrorCode::kUsage,
        "bench_ops: --rows {} is below --sequence {}", options.rows, options.sequence);
  return options;
}

}  // namespace
}  // namespace orlop::bench

int main(int argc, char** argv) {
  try {
    const auto options = orlop::bench::parse(argc, argv);
    fmt::print("{}; {} threads, {}, {} rows\n", orlop::cpu_summary(), options.threads,
               orlop::dtype_name(options.dtype), options.rows);
    orlop::bench::OpsBench(options).run();
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
