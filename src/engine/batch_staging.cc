#include "engine/batch_staging.h"

#include <algorithm>
#include <cstring>

#include "base/bytes.h"
#include "base/check.h"

namespace orlop {
namespace {

int32_t* ints(std::byte* base, size_t offset) { return reinterpret_cast<int32_t*>(base + offset); }
const int32_t* ints(const std::byte* base, size_t offset) {
  return reinterpret_cast<const int32_t*>(base + offset);
}

}  // namespace

BatchStaging::BatchStaging(int64_t rows, int64_t sequence_length, int64_t vocab_size,
                           int64_t max_positions)
    : rows_(rows),
      sequence_length_(sequence_length),
      vocab_size_(vocab_size),
      max_positions_(max_positions),
      counts_(static_cast<size_t>(std::max(vocab_size, max_positions) + 1)) {
  const auto take = [&](int64_t count) {
    const size_t offset = bytes_;
    bytes_ = align_up(bytes_ + static_cast<size_t>(count) * sizeof(int32_t), kDeviceAlignment);
    return offset;
  };
  at_.tokens = take(rows);
  at_.labels = take(rows);
  at_.positions = take(rows);
  at_.cu_seqlens = take(rows + 1);
  at_.token_rows = take(rows);
  at_.token_run_begin = take(rows + 1);
  at_.token_run_index = take(rows);
  at_.position_rows = take(rows);
  at_.position_run_begin = take(rows + 1);
  at_.position_run_index = take(rows);
}

void BatchStaging::fill(const MicroBatch& batch, std::byte* host, int index) {
  const int64_t tokens = static_cast<int64_t>(batch.tokens.size());
  check(tokens == rows_ && static_cast<int64_t>(batch.labels.size()) == rows_,
        ErrorCode::kInvalidData,
        "micro-batch {}: {} tokens and {} labels; the configuration says micro_batch_size * "
        "sequence_length = {}",
        index, tokens, batch.labels.size(), rows_);
  labelled_tokens_ = 0;
  for (int64_t row = 0; row < rows_; ++row) {
    const int32_t token = batch.tokens[static_cast<size_t>(row)];
    const int32_t label = batch.labels[static_cast<size_t>(row)];
    check(token >= 0 && token < vocab_size_, ErrorCode::kInvalidData,
          "micro-batch {}: token id {} at position {} is outside the vocabulary of {}", index,
          token, row, vocab_size_);
    check(label == kIgnoredLabel || (label >= 0 && label < vocab_size_), ErrorCode::kInvalidData,
          "micro-batch {}: label {} at position {} is outside the vocabulary of {} and not {} "
          "(ignored)",
          index, label, row, vocab_size_, kIgnoredLabel);
    if (label != kIgnoredLabel) ++labelled_tokens_;
  }
  std::memcpy(host + at_.tokens, batch.tokens.data(), batch.tokens.size() * sizeof(int32_t));
  std::memcpy(host + at_.labels, batch.labels.data(), batch.labels.size() * sizeof(int32_t));

  int32_t* cu_seqlens = ints(host, at_.cu_seqlens);
  if (batch.cu_seqlens.empty()) {
    sequences_ = rows_ / sequence_length_;
    for (int64_t s = 0; s <= sequences_; ++s)
      cu_seqlens[s] = static_cast<int32_t>(s * sequence_length_);
  } else {
    sequences_ = static_cast<int64_t>(batch.cu_seqlens.size()) - 1;
    check(sequences_ >= 1 && sequences_ <= rows_ && batch.cu_seqlens.front() == 0 &&
              batch.cu_seqlens.back() == rows_,
          ErrorCode::kInvalidData, "micro-batch {}: cu_seqlens must rise from 0 to {}", index,
          rows_);
    std::memcpy(cu_seqlens, batch.cu_seqlens.data(), batch.cu_seqlens.size() * sizeof(int32_t));
  }
  int32_t* positions = ints(host, at_.positions);
  for (int64_t s = 0; s < sequences_; ++s) {
    const int64_t end = cu_seqlens[s + 1];
    const int64_t length = end - cu_seqlens[s];
    check(length >= 1 && length <= max_positions_ && length <= sequence_length_ && end <= rows_,
          ErrorCode::kInvalidData,
          "micro-batch {}: document {} has {} tokens up to {} of {}; the model allows {}, the "
          "configured "
          "sequence length is {}",
          index, s, length, end, rows_, max_positions_, sequence_length_);
    for (int64_t i = 0; i < length; ++i) positions[cu_seqlens[s] + i] = static_cast<int32_t>(i);
  }
  token_runs_ = sort_runs(ints(host, at_.tokens), vocab_size_, host, at_.token_rows,
                          at_.token_run_begin, at_.token_run_index);
  position_runs_ = sort_runs(positions, max_positions_, host, at_.position_rows,
                             at_.position_run_begin, at_.position_run_index);
}

int64_t BatchStaging::sort_runs(const int32_t* keys, int64_t key_count, std::byte* host,
                                size_t rows_at, size_t begin_at, size_t index_at) {
  std::fill_n(counts_.begin(), key_count + 1, 0);
  for (int64_t row = 0; row < rows_; ++row) ++counts_[static_cast<size_t>(keys[row])];
  int32_t* begins = ints(host, begin_at);
  int32_t* indices = ints(host, index_at);
  int64_t runs = 0;
  int32_t next = 0;
  for (int64_t key = 0; key < key_count; ++key) {
    const int32_t count = counts_[static_cast<size_t>(key)];
    counts_[static_cast<size_t>(key)] = next;
    if (count == 0) continue;
    begins[runs] = next;
    indices[runs] = static_cast<int32_t>(key);
    ++runs;
    next += count;
  }
  begins[runs] = next;
  int32_t* sorted = ints(host, rows_at);
  for (int64_t row = 0; row < rows_; ++row) {
    sorted[counts_[static_cast<size_t>(keys[row])]++] = static_cast<int32_t>(row);
  }
  return runs;
}

BatchView BatchStaging::view(const std::byte* host, std::byte* device) const {
  BatchView view;
  view.tokens = ints(device, at_.tokens);
  view.labels = ints(device, at_.labels);
  view.positions = ints(device, at_.positions);
  view.cu_seqlens = ints(device, at_.cu_seqlens);
  view.cu_seqlens_host = {ints(host, at_.cu_seqlens), static_cast<size_t>(sequences_) + 1};
  view.rows = rows_;
  view.token_rows = ints(device, at_.token_rows);
  view.token_run_begin = ints(device, at_.token_run_begin);
  view.token_run_index = ints(device, at_.token_run_index);
  view.token_runs = token_runs_;
  view.position_rows = ints(device, at_.position_rows);
  view.position_run_begin = ints(device, at_.position_run_begin);
  view.position_run_index = ints(device, at_.position_run_index);
  view.position_runs = position_runs_;
  return view;
}

}  // namespace orlop
