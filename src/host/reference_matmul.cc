#include "host/element_types.h"
#include "host/matmul.h"
#include "host/parallel.h"

namespace orlop::host {
namespace {

template <typename In>
double element(const void* base, int64_t row, int64_t col, int64_t ld, bool transposed) {
  const int64_t index = transposed ? col * ld + row : row * ld + col;
  return static_cast<double>(In::load(static_cast<const typename In::Storage*>(base)[index]));
}

template <typename In, typename Out>
void multiply_row(const MatmulArgs& args, int64_t i) {
  auto* c = static_cast<typename Out::Storage*>(args.c) + i * args.ldc;
  for (int64_t j = 0; j < args.n; ++j) {
    double total = args.bias ? element<In>(args.bias, 0, j, 0, false) : 0.0;
    if (args.accumulate) total += static_cast<double>(Out::load(c[j]));
    for (int64_t p = 0; p < args.k; ++p) {
      total += element<In>(args.a, i, p, args.lda, args.trans_a) *
               element<In>(args.b, p, j, args.ldb, args.trans_b);
    }
    c[j] = Out::store(static_cast<float>(total));
  }
}

class ReferenceMatmul final : public Matmul {
 public:
  explicit ReferenceMatmul(int threads) : threads_(threads) {}

  void run(const MatmulArgs& args) override {
    with_element_type(args.in_dtype, [&]<typename In>(In) {
      with_element_type(args.out_dtype, [&]<typename Out>(Out) {
        parallel_for(threads_, args.m, [&](int64_t i) { multiply_row<In, Out>(args, i); });
      });
    });
  }

 private:
  const int threads_;
};

}  // namespace

std::unique_ptr<Matmul> make_reference_matmul(int threads) {
  return std::make_unique<ReferenceMatmul>(threads);
}

}  // namespace orlop::host
