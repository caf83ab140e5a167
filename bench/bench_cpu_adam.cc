// Adam on the CPU against the memory: elements per second of adam_step, the bytes that it moves,
// and beside them the bandwidth of an in-place scale measured before each pass.

#include <fmt/format.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "base/check.h"
#include "bench/support/huge_buffer.h"
#include "bench/support/memory_ceiling.h"
#include "bench/support/samples.h"
#include "cpu_adam/adam.h"

namespace orlop::bench {
namespace {

struct Options {
  int64_t numel = int64_t{64} << 20;
  int threads = default_threads();
  int repeats = 11;
  bool all_layouts = false;
  bool json = false;
};

struct Layout {
  DType compute;
  DType moment;
  DType grad;
};

// The planes of one shard, each on huge pages of its own.
class ShardMemory {
 public:
  ShardMemory(const Layout& layout, const Options& options) {
    const bool split = layout.compute == DType::kBF16;
    shard_.compute_dtype = layout.compute;
    shard_.moment_dtype = layout.moment;
    shard_.grad_dtype = layout.grad;
    shard_.numel = options.numel;
    if (layout.compute != DType::kF32) shard_.param = plane<void>(2, options);
    if (split) shard_.lo = plane<uint16_t>(2, options);
    if (!split) shard_.master = plane<float>(4, options);
    shard_.exp_avg = plane<void>(dtype_bytes(layout.moment), options);
    shard_.exp_avg_sq = plane<void>(dtype_bytes(layout.moment), options);
    void* grad = plane<void>(dtype_bytes(layout.grad), options);
    fill_grad(grad, layout.grad, options.numel);
    shard_.grad = grad;
  }

  const AdamShard& shard() const { return shard_; }

  // Every plane is read and, but for the gradient, written; fp16 compute only writes its copy.
  int64_t bytes_per_element() const {
    const auto grad = static_cast<int64_t>(dtype_bytes(shard_.grad_dtype));
    const int64_t read_and_written = 4 + 2 * static_cast<int64_t>(dtype_bytes(shard_.moment_dtype));
    return grad + 2 * read_and_written + (shard_.compute_dtype == DType::kF16 ? 2 : 0);
  }

 private:
  template <typename T>
  T* plane(size_t element_bytes, const Options& options) {
    buffers_.emplace_back(element_bytes * static_cast<size_t>(options.numel), options.threads);
    return buffers_.back().as<T>();
  }

  // Ordinary magnitudes: the time must not be that of zeros or subnormals.
  static void fill_grad(void* grad, DType dtype, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) {
      if (dtype == DType::kF32) {
        static_cast<float*>(grad)[i] = 1e-3f * static_cast<float>(1 + i % 7);
      } else {  // about 0.008 to 0.016 in bf16, 0.5 to 1 in fp16
        static_cast<uint16_t*>(grad)[i] =
            static_cast<uint16_t>((dtype == DType::kBF16 ? 0x3c00 : 0x3800) + i % 127);
      }
    }
  }

  std::vector<HugeBuffer> buffers_;
  AdamShard shard_;
};

struct Result {
  Summary elements_per_s;
  Summary ceiling_bytes_per_s;
  Summary of_ceiling;
};

Result measure(const ShardMemory& memory, MemoryCeiling& ceiling, const Options& options) {
  AdamHyper hyper{.lr = 1e-4, .weight_decay = 0.1};
  std::vector<double> rates, ceilings, ratios;
  for (int pass = -2; pass < options.repeats; ++pass) {  // two passes warm up
    const double ceiling_before = ceiling.bytes_per_s();
    const double seconds =
        seconds_of([&] { adam_step(memory.shard(), hyper, 0.5f, options.threads); });
    const double ceiling_beside = (ceiling_before + ceiling.bytes_per_s()) / 2;
    ++hyper.step;
    if (pass < 0) continue;
    const double rate = static_cast<double>(options.numel) / seconds;
    rates.push_back(rate);
    ceilings.push_back(ceiling_beside);
    ratios.push_back(rate * static_cast<double>(memory.bytes_per_element()) / ceiling_beside);
  }
  return {summarize(rates), summarize(ceilings), summarize(ratios)};
}

void print(const Layout& layout, int64_t bytes_per_element, const Result& result,
           const Options& options) {
  const double rate = result.elements_per_s.median;
  if (options.json) {
    fmt::print(
        R"({{"compute": "{}", "moment": "{}", "grad": "{}", "isa": "{}", "threads": {}, "numel": {}, )"
        R"("elements_per_s": {:.6g}, "bytes_per_element": {}, "ceiling_bytes_per_s": {:.6g}, )"
        R"("of_ceiling": {:.4f}}})"
        "\n",
        dtype_name(layout.compute), dtype_name(layout.moment), dtype_name(layout.grad),
        isa_name(active_isa()), options.threads, options.numel, rate, bytes_per_element,
        result.ceiling_bytes_per_s.median, result.of_ceiling.median);
    return;
  }
  fmt::print(
      "{:>7} {:>6} {:>5} | {:7.3f} {:6.0f}% | {:4} {:8.2f} | {:8.2f} | {:6.3f} [{:.3f}, {:.3f}]\n",
      dtype_name(layout.compute), dtype_name(layout.moment), dtype_name(layout.grad), rate / 1e9,
      100 * result.elements_per_s.spread(), bytes_per_element,
      rate * static_cast<double>(bytes_per_element) / 1e9, result.ceiling_bytes_per_s.median / 1e9,
      result.of_ceiling.median, result.of_ceiling.min, result.of_ceiling.max);
}

std::vector<Layout> layouts(bool all) {
  if (!all) return {{DType::kBF16, DType::kF32, DType::kBF16}};
  std::vector<Layout> list;
  for (const DType compute : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const DType moment : {DType::kF32, DType::kBF16}) {
      for (const DType grad : {DType::kBF16, DType::kF16, DType::kF32}) {
        list.push_back({compute, moment, grad});
      }
    }
  }
  return list;
}

int64_t parse_count(std::string_view flag, const char* text) {
  char* end = nullptr;
  const long long value = text == nullptr ? 0 : std::strtoll(text, &end, 10);
  check(value > 0 && *end == '\0', ErrorCode::kUsage, "{} needs a positive number", flag);
  return value;
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : nullptr;
    if (flag == "--all") {
      options.all_layouts = true;
    } else if (flag == "--json") {
      options.json = true;
    } else if (flag == "--numel") {
      options.numel = parse_count(flag, value), ++i;
    } else if (flag == "--threads") {
      options.threads = static_cast<int>(parse_count(flag, value)), ++i;
    } else if (flag == "--repeats") {
      options.repeats = static_cast<int>(parse_count(flag, value)), ++i;
    } else {
      fail(ErrorCode::kUsage,
           "unknown option {}; known: --all --json --numel N --threads N --repeats N", flag);
    }
  }
  return options;
}

void run(const Options& options) {
  MemoryCeiling ceiling(512 * kMiB, options.threads);
  if (!options.json) {
    fmt::print("{}; {} threads, {} elements, {} repeats, medians (rate with its spread)\n",
               cpu_summary(), options.threads, options.numel, options.repeats);
    fmt::print(
        "compute moment  grad |  Gelem/s spread | B/el     GB/s |    scale | of scale [min, "
        "max]\n");
  }
  for (const Layout& layout : layouts(options.all_layouts)) {
    const ShardMemory memory(layout, options);
    print(layout, memory.bytes_per_element(), measure(memory, ceiling, options), options);
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace orlop::bench

int main(int argc, char** argv) {
  try {
    orlop::bench::run(orlop::bench::parse(argc, argv));
    return 0;
  } catch (const orlop::Error& error) {
    fmt::print(stderr, "bench_cpu_adam: {}\n", error.what());
    return orlop::exit_code(error.code());
  } catch (const std::exception& error) {
    fmt::print(stderr, "bench_cpu_adam: {}\n", error.what());
    return 1;
  }
}
