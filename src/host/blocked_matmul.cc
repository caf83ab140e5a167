#include <algorithm>

#include "base/bytes.h"
#include "host/element_types.h"
#include "host/matmul.h"
#include "host/parallel.h"

namespace orlop::host {
namespace {

// One tile of c is summed in a buffer of its own over blocks of k; the operands are packed to fp32,
// so every dtype and transposition takes the same path. The buffers (about 150 KiB) lie on the
// stack.
constexpr int64_t kTileRows = 48;
constexpr int64_t kTileCols = 64;
constexpr int64_t kDepth = 256;

struct TileBuffers {
  alignas(64) float a[kTileRows * kDepth];
  alignas(64) float b[kDepth * kTileCols];
  alignas(64) float c[kTileRows * kTileCols];
};

// Packs (rows, cols) of a matrix whose element (i, j) lies at base[i * row + j * col].
template <typename In>
void pack(const typename In::Storage* base, int64_t row, int64_t col, int64_t rows, int64_t cols,
          float* to, int64_t ld) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) to[i * ld + j] = In::load(base[i * row + j * col]);
    std::fill(to + i * ld + cols, to + (i + 1) * ld, 0.0f);
  }
}

template <typename In, typename Out>
void write_tile(const MatmulArgs& args, const TileBuffers& tile, int64_t row, int64_t col) {
  const auto* bias = static_cast<const typename In::Storage*>(args.bias);
  for (int64_t i = 0; i < std::min(kTileRows, args.m - row); ++i) {
    auto* c = static_cast<typename Out::Storage*>(args.c) + (row + i) * args.ldc + col;
    for (int64_t j = 0; j < std::min(kTileCols, args.n - col); ++j) {
      float value = tile.c[i * kTileCols + j];
      if (bias) value += In::load(bias[col + j]);
      if (args.accumulate) value += Out::load(c[j]);
      c[j] = Out::store(value);
    }
  }
}

template <typename In, typename Out>
void multiply_tile(const KernelSet& kernels, const MatmulArgs& args, int64_t row, int64_t col) {
  TileBuffers tile;
  const int64_t a_row = args.trans_a ? 1 : args.lda, a_col = args.trans_a ? args.lda : 1;
  const int64_t b_row = args.trans_b ? 1 : args.ldb, b_col = args.trans_b ? args.ldb : 1;
  const auto* a = static_cast<const typename In::Storage*>(args.a) + row * a_row;
  const auto* b = static_cast<const typename In::Storage*>(args.b) + col * b_col;
  const int64_t rows = std::min(kTileRows, args.m - row), cols = std::min(kTileCols, args.n - col);
  std::fill(tile.c, tile.c + kTileRows * kTileCols, 0.0f);
  for (int64_t k = 0; k < args.k; k += kDepth) {
    const int64_t depth = std::min(kDepth, args.k - k);
    pack<In>(a + k * a_col, a_row, a_col, rows, depth, tile.a, kDepth);
    pack<In>(b + k * b_row, b_row, b_col, depth, cols, tile.b, kTileCols);
    kernels.block_product(
        {tile.a, tile.b, tile.c, rows, kTileCols, depth, kDepth, 1, kTileCols, kTileCols, true});
  }
  write_tile<In, Out>(args, tile, row, col);
}

class BlockedMatmul final : public Matmul {
 public:
  BlockedMatmul(const KernelSet& kernels, int threads) : kernels_(kernels), threads_(threads) {}

  void run(const MatmulArgs& args) override {
    const int64_t tile_rows = ceil_div(args.m, kTileRows), tile_cols = ceil_div(args.n, kTileCols);
    with_element_type(args.in_dtype, [&]<typename In>(In) {
      with_element_type(args.out_dtype, [&]<typename Out>(Out) {
        parallel_for(threads_, tile_rows * tile_cols, [&](int64_t tile) {
          multiply_tile<In, Out>(kernels_, args, tile / tile_cols * kTileRows,
                                 tile % tile_cols * kTileCols);
        });
      });
    });
  }

 private:
  const KernelSet& kernels_;
  const int threads_;
};

}  // namespace

std::unique_ptr<Matmul> make_blocked_matmul(const KernelSet& kernels, int threads) {
  return std::make_unique<BlockedMatmul>(kernels, threads);
}

}  // namespace orlop::host
