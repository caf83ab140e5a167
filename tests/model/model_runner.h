#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "formats/safetensors.h"
#include "model/block.h"

namespace orlop {

// Rows sorted by an index: what EmbeddingBackwardArgs reads.
struct SortedRuns {
  explicit SortedRuns(const std::vector<int32_t>& index);

  std::vector<int32_t> rows, begin, value;
  int64_t runs() const { return static_cast<int64_t>(value.size()); }
};

struct TestBatch {
  std::vector<int32_t> tokens, labels, positions, cu_seqlens;

  int64_t rows() const { return static_cast<int64_t>(tokens.size()); }
  int64_t longest() const;
  int64_t labelled() const;
};

// The simplest executor: everything resident, block after block. Before every call it fills the
// workspace, and what a call must write, with NaN, and it checks afterwards that nothing beyond the
// promised bytes was touched.
class ModelRunner {
 public:
  ModelRunner(TransformerConfig config, DType dtype, bool reference_ops, int64_t max_rows);

  const ModelLayout& layout() const { return layout_; }

  // Reads every segment under any of its names.
  void load(const SafetensorsReader& reader);

  // Loss of every row.
  std::vector<float> forward(const TestBatch& batch);
  // The same; adds the gradient of sum(loss) * scale to the gradients.
  std::vector<float> forward_backward(const TestBatch& batch, float scale);

  void zero_grads();
  // One segment's gradient.
  std::vector<float> grad(const std::string& name) const;
  // Every gap between segments holds zero, in weights and gradients.
  bool gaps_are_zero() const;

 private:
  struct Gap {
    size_t flat = 0;
    int64_t begin = 0, end = 0;
  };
  std::vector<Gap> gaps() const;
  void* input_of(size_t block) { return activations_[block - 1]; }
  std::vector<float> run(const TestBatch& batch, float scale, bool backward);
  void call(size_t block, const BatchView& batch, void* input, void* output, bool backward);

  TransformerConfig config_;
  ModelLayout layout_;
  DType dtype_;
  int64_t max_rows_;
  std::unique_ptr<Backend> backend_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<void*> params_;
  std::vector<float*> grads_;
  std::vector<void*> activations_;  // output of every block but the head
  void* grad_ = nullptr;
  float* loss_ = nullptr;
  float* scale_ = nullptr;
  const float* rope_ = nullptr;
  char* workspace_ = nullptr;
  size_t workspace_capacity_ = 0;
};

// Reads `name` as floats or int32.
std::vector<float> read_floats(const SafetensorsReader& reader, const std::string& name);
std::vector<int32_t> read_ints(const SafetensorsReader& reader, const std::string& name);

}  // namespace orlop
