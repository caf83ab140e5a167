#include "bench/support/matmul_ceiling.h"

#include <omp.h>

#include <dnnl.hpp>
#include <map>
#include <tuple>
#include <vector>

#include "bench/support/samples.h"

namespace orlop::bench {
namespace {

constexpr int kRuns = 5;
constexpr double kSecondsPerShape = 0.15;

using Type = dnnl::memory::data_type;
using Tag = dnnl::memory::format_tag;

struct Shape {
  int64_t m, n, k;
  Type in, out;
  bool bias, accumulate;
};
using Key = std::tuple<int64_t, int64_t, int64_t, int, int, bool, bool>;

bool multiplies_bf16() {
  const auto isa = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
  const auto needed = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_bf16);
  return (isa & needed) == needed;
}

dnnl::memory filled(const dnnl::memory::desc& desc, const dnnl::engine& engine) {
  dnnl::memory memory(desc, engine);
  auto* bytes = static_cast<unsigned char*>(memory.get_data_handle());
  // 0x3e3e3e3e and 0x3e3e are ordinary numbers in fp32 and bf16.
  std::fill(bytes, bytes + desc.get_size(), static_cast<unsigned char>(0x3e));
  return memory;
}

double seconds_alone(const Shape& shape) {
  const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  dnnl::stream stream(engine);
  const dnnl::memory::desc a({shape.m, shape.k}, shape.in, Tag::any);
  const dnnl::memory::desc b({shape.k, shape.n}, shape.in, Tag::any);
  const dnnl::memory::desc c({shape.m, shape.n}, shape.out, Tag::any);
  const dnnl::memory::desc bias({1, shape.n}, shape.in, Tag::ab);
  dnnl::primitive_attr attributes;
  if (shape.accumulate) {
    dnnl::post_ops sum;
    sum.append_sum(1.0f);
    attributes.set_post_ops(sum);
  }
  const auto desc = shape.bias ? dnnl::matmul::desc(a, b, bias, c) : dnnl::matmul::desc(a, b, c);
  const dnnl::matmul::primitive_desc chosen(desc, attributes, engine);
  const dnnl::matmul matmul(chosen);
  std::unordered_map<int, dnnl::memory> arguments = {
      {DNNL_ARG_SRC, filled(chosen.src_desc(), engine)},
      {DNNL_ARG_WEIGHTS, filled(chosen.weights_desc(), engine)},
      {DNNL_ARG_DST, filled(chosen.dst_desc(), engine)}};
  if (shape.bias) arguments.emplace(DNNL_ARG_BIAS, filled(bias, engine));
  const auto run = [&] {
    matmul.execute(stream, arguments);
    stream.wait();
  };
  run();
  std::vector<double> runs;
  double spent = 0;
  while (static_cast<int>(runs.size()) < kRuns || spent < kSecondsPerShape) {
    runs.push_back(seconds_of(run));
    spent += runs.back();
  }
  return summarize(runs).median;
}

}  // namespace

MatmulCeiling measure_matmuls_alone(std::span<const MatmulArgs> matmuls, int threads) {
  omp_set_num_threads(threads);
  const bool native = multiplies_bf16();
  std::map<Key, std::pair<Shape, int>> shapes;
  MatmulCeiling ceiling;
  for (const MatmulArgs& args : matmuls) {
    const auto type = [&](DType dtype) {
      return native && dtype == DType::kBF16 ? Type::bf16 : Type::f32;
    };
    const Shape shape{args.m,
                      args.n,
                      args.k,
                      type(args.in_dtype),
                      type(args.out_dtype),
                      args.bias != nullptr,
                      args.accumulate};
    const Key key{shape.m,
                  shape.n,
                  shape.k,
                  static_cast<int>(shape.in),
                  static_cast<int>(shape.out),
                  shape.bias,
                  shape.accumulate};
    auto& entry = shapes.try_emplace(key, shape, 0).first->second;
    ++entry.second;
    ceiling.flops += 2.0 * static_cast<double>(args.m) * static_cast<double>(args.n) *
                     static_cast<double>(args.k);
  }
  for (const auto& [key, entry] : shapes) {
    ceiling.seconds += entry.second * seconds_alone(entry.first);
  }
  ceiling.shapes = static_cast<int>(shapes.size());
  return ceiling;
}

}  // namespace orlop::bench
