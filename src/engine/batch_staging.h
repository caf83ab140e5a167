#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "model/block.h"
#include "orlop/engine.h"

namespace orlop {

// Index arrays of one micro-batch, laid out alike in pinned staging and in device memory: tokens,
// labels, positions, cu_seqlens, and the rows sorted by token and by position that the embedding's
// backward pass needs.
class BatchStaging {
 public:
  BatchStaging(int64_t rows, int64_t sequence_length, int64_t vocab_size, int64_t max_positions);

  size_t bytes() const { return bytes_; }

  // Checks `batch` and writes its arrays to `host`. `index` names the micro-batch in errors. Throws
  // Error(kInvalidData) for wrong lengths, a token or label outside the vocabulary, cu_seqlens that
  // do not rise from 0 to the number of tokens, or a document longer than the model's positions.
  void fill(const MicroBatch& batch, std::byte* host, int index);

  // The arrays that fill() wrote last, at `device`. cu_seqlens_host points into `host`.
  BatchView view(const std::byte* host, std::byte* device) const;

  int64_t labelled_tokens() const { return labelled_tokens_; }

 private:
  struct Offsets {
    size_t tokens, labels, positions, cu_seqlens;
    size_t token_rows, token_run_begin, token_run_index;
    size_t position_rows, position_run_begin, position_run_index;
  };

  // Sorts rows by key, stably; returns the number of runs of equal keys.
  int64_t sort_runs(const int32_t* keys, int64_t key_count, std::byte* host, size_t rows_at,
                    size_t begin_at, size_t index_at);

  int64_t rows_;
  int64_t sequence_length_;
  int64_t vocab_size_;
  int64_t max_positions_;
  Offsets at_{};
  size_t bytes_ = 0;
  int64_t sequences_ = 0;
  int64_t token_runs_ = 0;
  int64_t position_runs_ = 0;
  int64_t labelled_tokens_ = 0;
  std::vector<int32_t> counts_;  // scratch of sort_runs
};

}  // namespace orlop
