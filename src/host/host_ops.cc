#include "host/host_ops.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "cpu_adam/adam.h"
#include "host/element_types.h"
#include "host/host_queue.h"
#include "host/parallel.h"

namespace orlop::host {
namespace {

constexpr int64_t kElementGrain = 16384;  // of elementwise work, per thread
constexpr size_t kColumnSumBytes = 2 * kMiB;
constexpr int64_t kMostRowParts = 32;

// Rows are summed into columns in this many parts, in row order, and the parts in order: a function
// of the shape, so the bits do not depend on the threads.
int64_t row_parts(int64_t rows, int64_t cols) {
  constexpr auto kFloats = static_cast<int64_t>(kColumnSumBytes / sizeof(float));
  const int64_t fitting = kFloats / (2 * cols);
  check(fitting >= 1, ErrorCode::kUsage,
        "norm_backward: {} columns need {} bytes of workspace, it has {}", cols,
        2 * cols * static_cast<int64_t>(sizeof(float)), kColumnSumBytes);
  return std::max<int64_t>(1, std::min({kMostRowParts, fitting, rows}));
}

const KernelSet& fastest_kernels() {
  switch (active_isa()) {
    case Isa::kAvx512:
      return kAvx512Kernels;
    case Isa::kAvx2:
      return kAvx2Kernels;
    case Isa::kScalar:
      break;
  }
  return kBaselineKernels;
}

}  // namespace

const Kernels& kernels_of(const KernelSet& set, DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return set.f32;
    case DType::kF16:
      return set.f16;
    case DType::kBF16:
      return set.bf16;
    default:
      fail(ErrorCode::kUsage, "{} is not a compute dtype; use F32, BF16 or F16", dtype_name(dtype));
  }
}

size_t host_workspace_bytes(bool reference, [[maybe_unused]] int threads) {
#ifdef ORLOP_HAVE_ONEDNN
  if (!reference) return onednn_matmul_workspace_bytes(threads);
#else
  (void)reference;
#endif
  return kColumnSumBytes;
}

std::unique_ptr<Ops> make_host_ops(const HostOpsOptions& options) {
  if (options.reference) {
    return std::make_unique<HostOps>(kReferenceKernels, make_reference_matmul(options.threads),
                                     options);
  }
  const KernelSet& kernels = fastest_kernels();
#ifdef ORLOP_HAVE_ONEDNN
  auto matmul = make_onednn_matmul(kernels, options.threads, options.workspace);
#else
  auto matmul = make_blocked_matmul(kernels, options.threads);
#endif
  return std::make_unique<HostOps>(kernels, std::move(matmul), options);
}

HostOps::HostOps(const KernelSet& kernels, std::unique_ptr<Matmul> matmul,
                 const HostOpsOptions& options)
    : kernels_(kernels),
      matmul_(std::move(matmul)),
      threads_(options.threads),
      workspace_(options.workspace) {}

void HostOps::matmul(Queue& queue, const MatmulArgs& args) {
  check(!args.accumulate || args.out_dtype == DType::kF32, ErrorCode::kUsage,
        "matmul: c of dtype {} cannot accumulate; it must be F32", dtype_name(args.out_dtype));
  if (args.m == 0 || args.n == 0) return;
  host_queue(queue).enqueue("matmul", [this, args] { matmul_->run(args); });
}

void HostOps::bias_backward(Queue& queue, const void* dy, float* dbias, int64_t m, int64_t n,
                            DType dtype) {
  host_queue(queue).enqueue("bias_backward", [=, this] {
    constexpr int64_t kColumns = 256;  // each thread sums columns of its own, in row order
    parallel_for(threads_, ceil_div(n, kColumns), [&](int64_t part) {
      const int64_t begin = part * kColumns, width = std::min(kColumns, n - begin);
      for (int64_t r = 0; r < m; ++r) {
        kernels(dtype).accumulate(dbias + begin, at(dy, r * n + begin, dtype), width);
      }
    });
  });
}

void HostOps::norm_forward(Queue& queue, const NormArgs& args) {
  host_queue(queue).enqueue("norm_forward", [this, args] {
    const Kernels& kernels = this->kernels(args.dtype);
    parallel_for(threads_, args.rows, [&](int64_t r) {
      for (int64_t g = 0; g < args.groups; ++g) {
        const int64_t from = r * args.x_stride + g * args.cols;
        NormRow row = {.x = at(args.x, from, args.dtype),
                       .residual = args.residual ? at(args.residual, from, args.dtype) : nullptr,
                       .weight = args.weight,
                       .bias = args.bias,
                       .y = at(args.y, r * args.y_stride + g * args.cols, args.dtype),
                       .cols = args.cols,
                       .eps = args.eps,
                       .center = args.mean != nullptr,
                       .rstd = 0,
                       .mean = 0};
        kernels.norm_forward(row);
        args.rstd[r * args.groups + g] = row.rstd;
        if (args.mean) args.mean[r * args.groups + g] = row.mean;
      }
    });
  });
}

void HostOps::norm_backward(Queue& queue, const NormBackwardArgs& args) {
  host_queue(queue).enqueue("norm_backward", [this, args] { run_norm_backward(args); });
}

void HostOps::run_norm_backward(const NormBackwardArgs& args) {
  const Kernels& kernels = this->kernels(args.dtype);
  const int64_t parts = row_parts(args.rows, args.cols);
  auto* sums = static_cast<float*>(workspace_.data);  // (parts, 2, cols)
  parallel_for(threads_, parts, [&](int64_t part) {
    float* dweight = sums + part * 2 * args.cols;
    std::fill(dweight, dweight + 2 * args.cols, 0.0f);
    const int64_t end = args.rows * (part + 1) / parts;
    for (int64_t r = args.rows * part / parts; r < end; ++r) {
      for (int64_t g = 0; g < args.groups; ++g) {
        const int64_t x = r * args.x_stride + g * args.cols;
        const int64_t index = r * args.groups + g;
        kernels.norm_backward({.dy = at(args.dy, r * args.y_stride + g * args.cols, args.dtype),
                               .x = at(args.x, x, args.dtype),
                               .weight = args.weight,
                               .dx = at(args.dx, x, args.dtype),
                               .dweight = dweight,
                               .dbias = args.dbias ? dweight + args.cols : nullptr,
                               .cols = args.cols,
                               .center = args.mean != nullptr,
                               .accumulate_dx = args.accumulate_dx,
                               .rstd = args.rstd[index],
                               .mean = args.mean ? args.mean[index] : 0.0f});
      }
    }
  });
  parallel_pieces(threads_, args.cols, 256, [&](int64_t begin, int64_t end) {
    for (int64_t part = 0; part < parts; ++part) {
      const float* dweight = sums + part * 2 * args.cols;
      for (int64_t c = begin; c < end; ++c) args.dweight[c] += dweight[c];
      if (!args.dbias) continue;
      for (int64_t c = begin; c < end; ++c) args.dbias[c] += dweight[args.cols + c];
    }
  });
}

void HostOps::rope(Queue& queue, const RopeArgs& args) {
  host_queue(queue).enqueue(args.inverse ? "rope_backward" : "rope", [this, args] {
    const Kernels& kernels = this->kernels(args.dtype);
    parallel_for(threads_, args.rows, [&](int64_t r) {
      kernels.rope({.x = at(args.x, r * args.row_stride, args.dtype),
                    .cos_sin = args.cos_sin + args.positions[r] * args.rotary_dim,
                    .heads = args.heads,
                    .head_dim = args.head_dim,
                    .rotary_dim = args.rotary_dim,
                    .inverse = args.inverse});
    });
  });
}

void HostOps::activation_forward(Queue& queue, const ActivationArgs& args) {
  host_queue(queue).enqueue("activation", [this, args] {
    const Kernels& kernels = this->kernels(args.dtype);
    const bool gated = args.kind == Activation::kSwiGlu;
    const auto run = gated                                ? kernels.swiglu
                     : args.kind == Activation::kGeluTanh ? kernels.gelu_tanh
                                                          : kernels.gelu;
    const int64_t in_width = gated ? 2 * args.width : args.width;
    parallel_for(threads_, args.rows, [&](int64_t r) {
      run(at(args.in, r * in_width, args.dtype), at(args.out, r * args.width, args.dtype),
          args.width);
    });
  });
}

void HostOps::activation_backward(Queue& queue, const ActivationArgs& args) {
  host_queue(queue).enqueue("activation_backward", [this, args] {
    const Kernels& kernels = this->kernels(args.dtype);
    const bool gated = args.kind == Activation::kSwiGlu;
    const auto run = gated                                ? kernels.swiglu_backward
                     : args.kind == Activation::kGeluTanh ? kernels.gelu_tanh_backward
                                                          : kernels.gelu_backward;
    const int64_t in_width = gated ? 2 * args.width : args.width;
    parallel_for(threads_, args.rows, [&](int64_t r) {
      run(at(args.in, r * in_width, args.dtype), at(args.dout, r * args.width, args.dtype),
          at(args.din, r * in_width, args.dtype), args.width);
    });
  });
}

void HostOps::embedding_forward(Queue& queue, const EmbeddingArgs& args) {
  host_queue(queue).enqueue("embedding", [this, args] {
    for (int64_t r = 0; r < args.rows; ++r) {
      check(args.tokens[r] >= 0 && args.tokens[r] < args.vocab, ErrorCode::kInvalidData,
            "token {} of row {} is outside the vocabulary of {}", args.tokens[r], r, args.vocab);
    }
    const Kernels& kernels = this->kernels(args.dtype);
    const size_t row_bytes = static_cast<size_t>(args.cols) * dtype_bytes(args.dtype);
    parallel_for(threads_, args.rows, [&](int64_t r) {
      const void* from = at(args.table, args.tokens[r] * args.cols, args.dtype);
      void* to = at(args.out, r * args.cols, args.dtype);
      if (args.positions_table) {
        kernels.sum(from, at(args.positions_table, args.positions[r] * args.cols, args.dtype), to,
                    args.cols);
      } else {
        std::memcpy(to, from, row_bytes);
      }
    });
  });
}

void HostOps::embedding_backward(Queue& queue, const EmbeddingBackwardArgs& args) {
  host_queue(queue).enqueue("embedding_backward", [this, args] {
    const Kernels& kernels = this->kernels(args.dtype);
    parallel_items(threads_, args.runs, [&](int64_t run, int /*thread*/) {
      float* to = args.dtable + args.run_index[run] * args.cols;
      for (int32_t i = args.run_begin[run]; i < args.run_begin[run + 1]; ++i) {
        kernels.accumulate(to, at(args.dy, args.sorted_rows[i] * args.cols, args.dtype), args.cols);
      }
    });
  });
}

void HostOps::cross_entropy(Queue& queue, const CrossEntropyArgs& args) {
  host_queue(queue).enqueue("cross_entropy", [this, args] {
    for (int64_t r = 0; r < args.rows; ++r) {
      check(args.labels[r] < args.vocab, ErrorCode::kInvalidData,
            "label {} of row {} is outside the vocabulary of {}", args.labels[r], r, args.vocab);
    }
    const Kernels& kernels = this->kernels(args.dtype);
    const float scale = args.write_gradient ? *args.scale : 0.0f;
    parallel_for(threads_, args.rows, [&](int64_t r) {
      args.loss[r] = kernels.cross_entropy({.logits = at(args.logits, r * args.vocab, args.dtype),
                                            .vocab = args.vocab,
                                            .label = args.labels[r],
                                            .scale = scale,
                                            .write_gradient = args.write_gradient});
    });
  });
}

void HostOps::add(Queue& queue, void* to, const void* from, int64_t numel, DType dtype) {
  host_queue(queue).enqueue("add", [=, this] {
    parallel_pieces(threads_, numel, kElementGrain, [&](int64_t begin, int64_t end) {
      kernels(dtype).add(at(to, begin, dtype), at(from, begin, dtype), end - begin);
    });
  });
}

void HostOps::narrow(Queue& queue, const float* from, void* to, int64_t numel, DType dtype) {
  host_queue(queue).enqueue("narrow", [=, this] {
    parallel_pieces(threads_, numel, kElementGrain, [&](int64_t begin, int64_t end) {
      kernels(dtype).narrow(from + begin, at(to, begin, dtype), end - begin);
    });
  });
}

void HostOps::sum_rows(Queue& queue, const void* from, float* to, int64_t rows, int64_t numel,
                       DType dtype) {
  host_queue(queue).enqueue("sum_rows", [=, this] {
    parallel_pieces(threads_, numel, kElementGrain, [&](int64_t begin, int64_t end) {
      kernels(dtype).widen(at(from, begin, dtype), to + begin, end - begin);
      for (int64_t row = 1; row < rows; ++row) {
        const void* added = at(from, row * numel + begin, dtype);
        kernels(dtype).accumulate(to + begin, added, end - begin);
      }
    });
  });
}

// Logits of one chunk take about 16 MiB: enough rows for an efficient product, little beside the
// gradient of the table.
int64_t HostOps::head_chunk_rows(int64_t vocab, DType dtype) const {
  const auto row_bytes = vocab * static_cast<int64_t>(dtype_bytes(dtype));
  const int64_t rows = static_cast<int64_t>(12 * kMiB) / row_bytes;
  return std::clamp<int64_t>(rows / 16 * 16, 16, 1024);
}

}  // namespace orlop::host
