#pragma once

#include <algorithm>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <dnnl.hpp>
#include <map>
#include <optional>
#include <vector>

#include "base/bytes.h"
#include "host/matmul.h"
#include "orlop/types.h"

namespace orlop::host {

// The length of equal parts of `total`, each at most `at_most` and all but the last a multiple.
inline int64_t equal_parts(int64_t total, int64_t at_most, int64_t multiple) {
  const int64_t parts = ceil_div(total, std::max(at_most, multiple));
  return std::min(total, ceil_div(ceil_div(total, parts), multiple) * multiple);
}

// One product as oneDNN sees it: strides in elements, all that the choice of a kernel depends on.
struct Product {
  int64_t m, n, k;
  int64_t a_row, a_col, b_row, b_col, ldc;
  DType in, out;
  bool bias, accumulate;

  auto operator<=>(const Product&) const = default;
};

struct Operands {
  const void* a;
  const void* b;
  const void* bias;
  void* c;
};

// Products through oneDNN, with the same bits for any number of threads. Each primitive is made
// once; afterwards a call sets four pointers.
class Gemm {
 public:
  Gemm(int threads, Workspace scratchpad);

  void run(const Product& product, const Operands& operands);

  // Whether the operands are read tile by tile.
  bool runs_in_tiles(const Product& product) { return !whole(product); }

  static bool has_native_bf16();

 private:
  // What a caller hands to a primitive.
  struct Arguments {
    dnnl::memory a, b, bias, c, scratchpad;
  };
  struct Primitive {
    dnnl::matmul matmul;
    std::vector<Arguments> of_caller;
  };

  dnnl::matmul::primitive_desc describe(const Product& p, size_t scratchpad_bytes) const;
  Primitive make(const Product& p, const dnnl::matmul::primitive_desc& chosen, int callers) const;
  std::optional<Primitive>& whole(const Product& p);
  Primitive& tile(const Product& p);
  dnnl_status_t run_in_tiles(const Product& product, const Operands& operands);
  dnnl_status_t execute(Primitive& primitive, const Operands& operands, int caller) const;

  const int threads_;
  const Workspace scratchpad_;
  const size_t share_;  // of one thread in the scratchpad
  const dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  std::vector<dnnl::stream> streams_;                  // of each thread
  std::map<Product, std::optional<Primitive>> whole_;  // nothing: in tiles
  std::map<Product, Primitive> tiles_;
};

}  // namespace orlop::host
