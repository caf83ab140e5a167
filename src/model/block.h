#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "backend/ops.h"
#include "model/param_layout.h"
#include "model/transformer_config.h"

namespace orlop {

class Queue;

// One micro-batch in device memory. `rows` tokens, cut into sequences by cu_seqlens.
struct BatchView {
  const int32_t* tokens = nullptr;
  const int32_t* labels = nullptr;     // label of every row, already shifted; below 0: ignored
  const int32_t* positions = nullptr;  // position inside the sequence
  const int32_t* cu_seqlens = nullptr;
  std::span<const int32_t> cu_seqlens_host;
  int64_t rows = 0;
  // Rows sorted by token id (embedding backward) and, for learned positions, by position.
  const int32_t* token_rows = nullptr;
  const int32_t* token_run_begin = nullptr;
  const int32_t* token_run_index = nullptr;
  int64_t token_runs = 0;
  const int32_t* position_rows = nullptr;
  const int32_t* position_run_begin = nullptr;
  const int32_t* position_run_index = nullptr;
  int64_t position_runs = 0;
  float* loss = nullptr;         // (rows) fp32, written by the head
  const float* scale = nullptr;  // one fp32: loss_scale / labelled tokens of the step
};

// Everything one call of a block touches. Device memory; nothing is kept after the work has run.
struct BlockCall {
  Ops& ops;
  Queue& queue;
  const BatchView& batch;
  std::span<const void* const> params;  // one per FlatParam of the block, in compute dtype
  std::span<float* const> grads;        // likewise, fp32, accumulated into; empty in forward
  void* workspace = nullptr;            // workspace_bytes()
  const float* rope = nullptr;          // rope_table() of the model
};

// A shape for planning: rows of a micro-batch and its longest sequence.
struct BatchShape {
  int64_t rows = 0;
  int64_t max_sequence = 0;
};

// One block, written once over Ops. Stateless: the same object serves every micro-batch.
// Activations between blocks are (rows, hidden) in compute dtype.
class Block {
 public:
  virtual ~Block() = default;

  virtual size_t workspace_bytes(const Ops& ops, const BatchShape& shape, bool backward) const = 0;

  // input (rows, hidden); null for the embedding. output (rows, hidden), not the input's memory;
  // null for the head, which writes batch.loss instead and leaves gradients alone.
  virtual void forward(const BlockCall& call, const void* input, void* output) = 0;

  // Recomputes the forward from `input`, accumulates into call.grads and turns `grad`, in place,
  // from the gradient of the output into the gradient of the input. The head starts the backward
  // pass: it writes batch.loss and `grad`. The embedding only reads `grad`.
  virtual void backward(const BlockCall& call, const void* input, void* grad) = 0;
};

std::unique_ptr<Block> make_block(const TransformerConfig& config, const ModelLayout& layout,
                                  int block_index, DType dtype);

// Floating-point operations of the block's matmuls and of its attention below the diagonal, per
// forward call over sequences of shape.max_sequence tokens (a multiply-add is two).
double block_forward_flops(const TransformerConfig& config, BlockKind kind,
                           const BatchShape& shape);

// What of that is attention.
double block_attention_flops(const TransformerConfig& config, BlockKind kind,
                             const BatchShape& shape);

// Bytes of activations in `dtype` that its other operations (norms, rotation, activation function,
// residual sums, cross-entropy) read and write in the same call.
double block_forward_bytes(const TransformerConfig& config, BlockKind kind, const BatchShape& shape,
                           DType dtype);

}  // namespace orlop
