#include <algorithm>
#include <tuple>
#include <utility>

#include "base/bytes.h"
#include "host/element_types.h"
#include "host/matmul.h"
#include "host/onednn_gemm.h"
#include "host/parallel.h"

namespace orlop::host {
namespace {

// The workspace: fp32 panels of 16-bit operands, then oneDNN's scratchpad, which it takes from us
// so that it is counted. (What its JIT kernels allocate for themselves cannot be seen from
// outside.)
constexpr size_t kPanelBytes = 6 * kMiB;
constexpr size_t kScratchpadBytesPerThread = kMiB + kMiB / 4;

// The inner dimension is cut so that oneDNN's scratchpad, which holds transposed operands for the
// whole depth, keeps to its share.
constexpr int64_t kDirectDepth = 2048;
constexpr int64_t kPanelDepth = 1024;

// Sizes of the fp32 panels of a 16-bit product; a function of its shape only.
struct Panels {
  int64_t m, n, k;
};

// Rows of a transposed a and of a plain b in their panels lie this much further apart where they
// would share cache sets.
constexpr int64_t kRowPadding = 16;

int64_t padded_row(int64_t length) { return length % 256 == 0 ? length + kRowPadding : length; }

// Half of the memory goes to b, the rest to a and, when c is not fp32 itself, to the sums of c.
Panels choose_panels(const MatmulArgs& args) {
  constexpr auto kFloats =
      static_cast<int64_t>(kPanelBytes / sizeof(float)) - 2 * kRowPadding * kPanelDepth;
  const int64_t k = equal_parts(args.k, kPanelDepth, 64);
  const int64_t n = equal_parts(args.n, kFloats / 2 / k, 64);
  const int64_t sums = args.out_dtype == DType::kF32 ? 0 : n;
  const int64_t most_rows = (kFloats - k * n) / (k + sums);
  return {equal_parts(args.m, most_rows / 64 * 64, 1), n, k};
}

class OneDnnMatmul final : public Matmul {
 public:
  OneDnnMatmul(const KernelSet& kernels, int threads, Workspace workspace)
      : kernels_(kernels),
        threads_(threads),
        panels_(static_cast<float*>(workspace.data)),
        gemm_(threads, {static_cast<std::byte*>(workspace.data) + kPanelBytes,
                        workspace.bytes - kPanelBytes}),
        native_bf16_(Gemm::has_native_bf16()) {}

  void run(const MatmulArgs& args) override {
    const bool native =
        args.in_dtype == DType::kF32 || (native_bf16_ && args.in_dtype == DType::kBF16);
    if (native && args.out_dtype != DType::kF16 && !collides(args)) {
      run_direct(args);
    } else {
      run_in_panels(args);
    }
  }

 private:
  // oneDNN reads a plain fp32 b where it lies, and in tiles a transposed a as well; rows a multiple
  // of 2 KiB apart share few cache sets, and the product runs at two thirds of its speed.
  bool collides(const MatmulArgs& args) {
    constexpr int64_t kCollidingFloats = 512;
    const auto shares_sets = [](int64_t length, int64_t ld) {
      return length > kCollidingFloats && ld % kCollidingFloats == 0;
    };
    if (args.in_dtype != DType::kF32) return false;
    return (!args.trans_b && shares_sets(args.n, args.ldb)) ||
           (args.trans_a && shares_sets(args.m, args.lda) &&
            gemm_.runs_in_tiles(direct_product(args)));
  }

  // The first of those that run_direct() adds up.
  static Product direct_product(const MatmulArgs& args) {
    const bool cut = args.out_dtype == DType::kF32 && (args.trans_a || args.trans_b);
    const auto [a_row, a_col] = strides(args.lda, args.trans_a);
    const auto [b_row, b_col] = strides(args.ldb, args.trans_b);
    return {.m = args.m,
            .n = args.n,
            .k = cut ? equal_parts(args.k, kDirectDepth, 64) : args.k,
            .a_row = a_row,
            .a_col = a_col,
            .b_row = b_row,
            .b_col = b_col,
            .ldc = args.ldc,
            .in = args.in_dtype,
            .out = args.out_dtype,
            .bias = args.bias != nullptr,
            .accumulate = args.accumulate};
  }

  void run_direct(const MatmulArgs& args) {
    Product product = direct_product(args);
    const int64_t depth = product.k;
    for (int64_t k = 0; k < args.k; k += depth) {
      product.k = std::min(depth, args.k - k);
      gemm_.run(product, {at(args.a, k * product.a_col, args.in_dtype),
                          at(args.b, k * product.b_row, args.in_dtype), args.bias, args.c});
      product.accumulate = true;
      product.bias = false;
    }
  }

  static std::pair<int64_t, int64_t> strides(int64_t ld, bool transposed) {
    return transposed ? std::pair(int64_t{1}, ld) : std::pair(ld, int64_t{1});
  }

  // The operands become fp32 panel by panel and the product runs in fp32; a 16-bit c is rounded
  // once, from sums over the whole depth.
  void run_in_panels(const MatmulArgs& args) {
    const Panels panel = choose_panels(args);
    for (int64_t n = 0; n < args.n; n += panel.n) {
      for (int64_t m = 0; m < args.m; m += panel.m) {
        MatmulArgs part = args;
        part.m = std::min(panel.m, args.m - m);
        part.n = std::min(panel.n, args.n - n);
        part.a = at(args.a, args.trans_a ? m : m * args.lda, args.in_dtype);
        part.b = at(args.b, args.trans_b ? n * args.ldb : n, args.in_dtype);
        part.c = at(args.c, m * args.ldc + n, args.out_dtype);
        if (args.bias) part.bias = at(args.bias, n, args.in_dtype);
        const bool b_is_there = m > 0 && panel.k == args.k;
        run_panel(part, panel, b_is_there);
      }
    }
  }

  void run_panel(const MatmulArgs& part, const Panels& panel, bool b_is_there) {
    float* b = panels_;
    float* a = b + panel.k * (panel.n + kRowPadding);
    float* sums = a + panel.k * (panel.m + kRowPadding);
    const bool direct = part.out_dtype == DType::kF32;
    float* c = direct ? static_cast<float*>(part.c) : sums;
    const int64_t ldc = direct ? part.ldc : panel.n;
    for (int64_t k = 0; k < part.k; k += panel.k) {
      const int64_t depth = std::min(panel.k, part.k - k);
      const void* from_a = at(part.a, part.trans_a ? k * part.lda : k, part.in_dtype);
      const void* from_b = at(part.b, part.trans_b ? k : k * part.ldb, part.in_dtype);
      const int64_t rows_a = part.trans_a ? depth : part.m, cols_a = part.trans_a ? part.m : depth;
      const int64_t rows_b = part.trans_b ? part.n : depth, cols_b = part.trans_b ? depth : part.n;
      const int64_t lda = part.trans_a ? padded_row(part.m) : depth;
      const int64_t ldb = part.trans_b ? depth : padded_row(part.n);
      widen(part.in_dtype, {from_a, part.lda, rows_a, cols_a, a, lda},
            {from_b, part.ldb, b_is_there ? 0 : rows_b, cols_b, b, ldb});
      Product product = {part.m, part.n, depth,       0,           0,     0,
                         0,      ldc,    DType::kF32, DType::kF32, false, k > 0 || part.accumulate};
      std::tie(product.a_row, product.a_col) = strides(lda, part.trans_a);
      std::tie(product.b_row, product.b_col) = strides(ldb, part.trans_b);
      gemm_.run(product, {a, b, nullptr, c});
    }
    finish_panel(part, c, ldc);
  }

  // (rows, cols) as they are stored, to fp32.
  struct Widening {
    const void* from;
    int64_t from_ld, rows, cols;
    float* to;
    int64_t to_ld;
  };

  // Both operands at once, so that the threads meet once.
  void widen(DType dtype, const Widening& a, const Widening& b) {
    const Kernels& kernels = kernels_of(kernels_, dtype);
    parallel_for(threads_, a.rows + b.rows, [&](int64_t row) {
      const Widening& one = row < a.rows ? a : b;
      const int64_t r = row < a.rows ? row : row - a.rows;
      kernels.widen(at(one.from, r * one.from_ld, dtype), one.to + r * one.to_ld, one.cols);
    });
  }

  void finish_panel(const MatmulArgs& part, float* c, int64_t ldc) {
    const bool rounds = part.out_dtype != DType::kF32;
    if (!rounds && !part.bias) return;
    parallel_for(threads_, part.m, [&](int64_t r) {
      float* row = c + r * ldc;
      if (part.bias) kernels_of(kernels_, part.in_dtype).accumulate(row, part.bias, part.n);
      if (rounds) {
        void* to = at(part.c, r * part.ldc, part.out_dtype);
        kernels_of(kernels_, part.out_dtype).narrow(row, to, part.n);
      }
    });
  }

  const KernelSet& kernels_;
  const int threads_;
  float* const panels_;
  Gemm gemm_;
  const bool native_bf16_;
};

}  // namespace

size_t onednn_matmul_workspace_bytes(int threads) {
  return kPanelBytes + static_cast<size_t>(threads) * kScratchpadBytesPerThread;
}

std::unique_ptr<Matmul> make_onednn_matmul(const KernelSet& kernels, int threads,
                                           Workspace workspace) {
  return std::make_unique<OneDnnMatmul>(kernels, threads, workspace);
}

}  // namespace orlop::host
