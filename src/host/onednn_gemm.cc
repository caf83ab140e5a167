#include "host/onednn_gemm.h"

#include <omp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <string_view>

#include "base/bytes.h"
#include "base/check.h"
#include "host/element_types.h"
#include "host/parallel.h"

namespace orlop::host {
namespace {

constexpr int64_t kTileRows = 192, kTileCols = 384;  // at most
constexpr int64_t kTileMultiple = 16;
constexpr size_t kAlignment = 4096;  // of each thread's scratchpad

dnnl::memory::data_type type_of(DType dtype) {
  return dtype == DType::kF32 ? dnnl::memory::data_type::f32 : dnnl::memory::data_type::bf16;
}

// Where this is, oneDNN works on the thread that calls it.
class OneThreadEach {
 public:
  OneThreadEach() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~OneThreadEach() { omp_set_num_threads(before_); }
  OneThreadEach(const OneThreadEach&) = delete;
  OneThreadEach& operator=(const OneThreadEach&) = delete;

 private:
  const int before_;
};

// This kernel, of processors without AVX-512 above all, shares the depth of a product out over its
// threads, and so adds in an order that depends on their number.
bool depends_on_threads(const dnnl::matmul::primitive_desc& chosen) {
  return std::string_view(chosen.impl_info_str()).starts_with("gemm:");
}

}  // namespace

Gemm::Gemm(int threads, Workspace scratchpad)
    : threads_(threads),
      scratchpad_(scratchpad),
      share_(scratchpad.bytes / static_cast<size_t>(threads) / kAlignment * kAlignment) {
  for (int thread = 0; thread < threads; ++thread) streams_.emplace_back(engine_);
}

// Emulated bf16 is three to four times slower than converting and multiplying in fp32.
bool Gemm::has_native_bf16() {
  const auto isa = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
  const auto needed = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_bf16);
  return (isa & needed) == needed;
}

void Gemm::run(const Product& product, const Operands& operands) {
  std::optional<Primitive>& primitive = whole(product);
  const dnnl_status_t status =
      primitive ? execute(*primitive, operands, 0) : run_in_tiles(product, operands);
  check(status == dnnl_success, ErrorCode::kDevice,
        "oneDNN: a product of m {}, n {}, k {} failed with status {}", product.m, product.n,
        product.k, static_cast<int>(status));
}

// Tiles are cut by shape alone, and each is one thread's.
dnnl_status_t Gemm::run_in_tiles(const Product& product, const Operands& operands) {
  const OneThreadEach one_thread_each;
  const int64_t rows = equal_parts(product.m, kTileRows, kTileMultiple);
  const int64_t cols = equal_parts(product.n, kTileCols, kTileMultiple);
  const int64_t down = ceil_div(product.m, rows), across = ceil_div(product.n, cols);
  std::array<std::array<Primitive*, 2>, 2> primitives{};  // by last row, last column
  const auto shape_of = [&](int64_t row, int64_t col) {
    Product tile = product;
    tile.m = std::min(rows, product.m - row * rows);
    tile.n = std::min(cols, product.n - col * cols);
    return tile;
  };
  for (const bool last_row : {false, true}) {
    for (const bool last_col : {false, true}) {
      primitives[last_row][last_col] =
          &tile(shape_of(last_row ? down - 1 : 0, last_col ? across - 1 : 0));
    }
  }
  std::atomic<dnnl_status_t> failed = dnnl_success;
  parallel_items(threads_, down * across, [&](int64_t item, int thread) {
    const int64_t row = item / across, col = item % across;
    const int64_t m = row * rows, n = col * cols;
    const dnnl_status_t status =
        execute(*primitives[row == down - 1][col == across - 1],
                {.a = at(operands.a, m * product.a_row, product.in),
                 .b = at(operands.b, n * product.b_col, product.in),
                 .bias = product.bias ? at(operands.bias, n, product.in) : nullptr,
                 .c = at(operands.c, m * product.ldc + n, product.out)},
                thread);
    if (status != dnnl_success) failed = status;
  });
  return failed;
}

std::optional<Gemm::Primitive>& Gemm::whole(const Product& p) {
  const auto [found, is_new] = whole_.try_emplace(p);
  if (is_new) {
    const auto chosen = describe(p, scratchpad_.bytes);
    if (!depends_on_threads(chosen)) found->second = make(p, chosen, 1);
  }
  return found->second;
}

Gemm::Primitive& Gemm::tile(const Product& p) {
  auto found = tiles_.find(p);
  if (found == tiles_.end())
    found = tiles_.emplace(p, make(p, describe(p, share_), threads_)).first;
  return found->second;
}

// A shape whose scratchpad does not fit ours keeps one of the library's.
dnnl::matmul::primitive_desc Gemm::describe(const Product& p, size_t scratchpad_bytes) const {
  const dnnl::memory::desc a({p.m, p.k}, type_of(p.in), {p.a_row, p.a_col});
  const dnnl::memory::desc b({p.k, p.n}, type_of(p.in), {p.b_row, p.b_col});
  const dnnl::memory::desc c({p.m, p.n}, type_of(p.out), {p.ldc, 1});
  const dnnl::memory::desc bias({1, p.n}, type_of(p.in), {p.n, 1});
  const auto desc = p.bias ? dnnl::matmul::desc(a, b, bias, c) : dnnl::matmul::desc(a, b, c);
  const auto with = [&](dnnl::scratchpad_mode mode) {
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(mode);
    if (p.accumulate) {
      dnnl::post_ops sum;
      sum.append_sum(1.0f);
      attributes.set_post_ops(sum);
    }
    return dnnl::matmul::primitive_desc(desc, attributes, engine_);
  };
  const auto ours = with(dnnl::scratchpad_mode::user);
  return ours.scratchpad_desc().get_size() <= scratchpad_bytes
             ? ours
             : with(dnnl::scratchpad_mode::library);
}

Gemm::Primitive Gemm::make(const Product& p, const dnnl::matmul::primitive_desc& chosen,
                           int callers) const {
  const auto memory = [&](const dnnl::memory::desc& desc) {
    return dnnl::memory(desc, engine_, nullptr);
  };
  Primitive made{dnnl::matmul(chosen), {}};
  for (int caller = 0; caller < callers; ++caller) {
    Arguments arguments{memory(chosen.src_desc()),
                        memory(chosen.weights_desc()),
                        {},
                        memory(chosen.dst_desc()),
                        {}};
    if (p.bias) arguments.bias = memory(chosen.bias_desc());
    if (chosen.scratchpad_desc().get_size() > 0) {  // none where the library keeps it
      arguments.scratchpad = dnnl::memory(
          chosen.scratchpad_desc(), engine_,
          static_cast<std::byte*>(scratchpad_.data) + static_cast<size_t>(caller) * share_);
    }
    made.of_caller.push_back(arguments);
  }
  return made;
}

dnnl_status_t Gemm::execute(Primitive& primitive, const Operands& operands, int caller) const {
  Arguments& given = primitive.of_caller[static_cast<size_t>(caller)];
  given.a.set_data_handle(const_cast<void*>(operands.a));
  given.b.set_data_handle(const_cast<void*>(operands.b));
  given.c.set_data_handle(operands.c);
  std::array<dnnl_exec_arg_t, 5> args = {{{DNNL_ARG_SRC, given.a.get()},
                                          {DNNL_ARG_WEIGHTS, given.b.get()},
                                          {DNNL_ARG_DST, given.c.get()}}};
  int count = 3;
  if (given.bias) {
    given.bias.set_data_handle(const_cast<void*>(operands.bias));
    args[static_cast<size_t>(count++)] = {DNNL_ARG_BIAS, given.bias.get()};
  }
  if (given.scratchpad) {
    args[static_cast<size_t>(count++)] = {DNNL_ARG_SCRATCHPAD, given.scratchpad.get()};
  }
  return dnnl_primitive_execute(primitive.matmul.get(), streams_[static_cast<size_t>(caller)].get(),
                                count, args.data());
}

}  // namespace orlop::host
