#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "backend/ops.h"
#include "cpu_adam/adam.h"

// Launchers of the kernels. Each issues work on `stream`, returns at once when there is none and
// throws Error(kDevice) for a refused launch, Error(kUsage) for a dtype that it does not have.
namespace orlop::kernels {

// x += residual, statistics and the normalised output in one pass over device memory.
void norm_forward(const NormArgs& args, cudaStream_t stream);

// dx and, through partial sums in `workspace`, dweight and dbias in a fixed order.
size_t norm_backward_workspace_bytes(const NormBackwardArgs& args);
void norm_backward(const NormBackwardArgs& args, void* workspace, cudaStream_t stream);

size_t bias_backward_workspace_bytes(int64_t m, int64_t n);
void bias_backward(const void* dy, float* dbias, int64_t m, int64_t n, DType dtype, void* workspace,
                   cudaStream_t stream);

void rope(const RopeArgs& args, cudaStream_t stream);
void activation_forward(const ActivationArgs& args, cudaStream_t stream);
void activation_backward(const ActivationArgs& args, cudaStream_t stream);
void embedding_forward(const EmbeddingArgs& args, cudaStream_t stream);
void embedding_backward(const EmbeddingBackwardArgs& args, cudaStream_t stream);
void cross_entropy(const CrossEntropyArgs& args, cudaStream_t stream);
void add(void* to, const void* from, int64_t numel, DType dtype, cudaStream_t stream);

void narrow(const float* from, void* to, int64_t numel, DType dtype, cudaStream_t stream);
void sum_rows(const void* from, float* to, int64_t rows, int64_t numel, DType dtype,
              cudaStream_t stream);

size_t grad_norm_scratch_bytes(int64_t numel);
void round_grad(const RoundGradArgs& args, cudaStream_t stream);

// The square sum of a gradient as it is: that of round_grad() where it would round to `dtype`.
struct SquareSumArgs {
  const void* values = nullptr;
  DType dtype = DType::kF32;  // F32, BF16 or F16
  double* square_sum = nullptr;
  int64_t* first_nonfinite = nullptr;
  int64_t numel = 0;
};
// So many bytes, the first of the scratch, are zero before its first use. A call leaves them so.
inline constexpr size_t kSquareSumsZeroBytes = 256;
size_t square_sums_scratch_bytes(std::span<const SquareSumArgs> tensors);
// One launch for every 64 tensors of one dtype.
void square_sums(std::span<const SquareSumArgs> tensors, void* scratch, cudaStream_t stream);
// To the current device, which loads kernels when they are first asked for.
void load_square_sums();
void finish_norm(const FinishNormArgs& args, cudaStream_t stream);

// `constants` are those of the step; its grad_scale is read from args.scalars instead.
void device_adam(const DeviceAdamArgs& args, const AdamConstants& constants, cudaStream_t stream);

// Any shape, layout and dtype of MatmulArgs, fp32 sums over k in rising order. For what cuBLASLt
// refuses.
void plain_matmul(const MatmulArgs& args, cudaStream_t stream);
// c (m, n) of out_dtype += bias (n) of in_dtype.
void add_bias(const MatmulArgs& args, cudaStream_t stream);

// Attention for every dtype and head_dim up to kMaxPlainHeadDim, without atomics.
inline constexpr int64_t kMaxPlainHeadDim = 256;
void plain_attention_forward(const AttentionArgs& args, cudaStream_t stream);
size_t plain_attention_backward_workspace_bytes(int64_t rows, int64_t heads);
void plain_attention_backward(const AttentionBackwardArgs& args, cudaStream_t stream);

// to[o, r, c] = from[o, r, c] over (outer, rows, cols) fp32, each with strides of its own in
// elements.
struct PermuteArgs {
  const float* from = nullptr;
  float* to = nullptr;
  int64_t outer = 0, rows = 0, cols = 0;
  int64_t from_outer = 0, from_row = 0, from_col = 0;
  int64_t to_outer = 0, to_row = 0, to_col = 0;
};
void permute(const PermuteArgs& args, cudaStream_t stream);

// What cuDNN reads of one ragged sequence, written to `slot` (16 int32, aligned to 16 bytes): at 0
// its length, and at 4, 8 and 12 the pairs (0, length * stride) of q, k and v, and out.
struct SequenceArgs {
  int64_t length = 0, q_stride = 0, kv_stride = 0, out_stride = 0;
};
void set_sequence(const SequenceArgs& args, int32_t* slot, cudaStream_t stream);

// A copy between two addresses that the device reaches, pinned host memory among them.
struct SmallCopy {
  void* to = nullptr;
  const void* from = nullptr;
  uint32_t bytes = 0;
};
// One launch for every 128.
void copy_small(std::span<const SmallCopy> copies, cudaStream_t stream);
void load_copy_small();

// True when this build has code for the current device; `reason` then stays null.
bool device_has_code(const char** reason);

}  // namespace orlop::kernels
