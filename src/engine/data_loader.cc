#include <algorithm>
#include <numeric>

#include "base/bytes.h"
#include "base/check.h"
#include "formats/token_file.h"
#include "orlop/engine.h"

namespace orlop {
namespace {

// SplitMix64 (Steele, Lea & Flood 2014): the same numbers on every platform.
class RandomBits {
 public:
  explicit RandomBits(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    state_ += 0x9e3779b97f4a7c15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  // Uniform in [0, bound): the high half of a 128-bit product, its small bias below 2^-32 here.
  uint64_t below(uint64_t bound) {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(next()) * bound) >> 64);
  }

 private:
  uint64_t state_;
};

constexpr int32_t kPaddingToken = 0;

}  // namespace

class DataLoader::Impl {
 public:
  Impl(const std::string& token_file, const BatchConfig& batch, uint64_t seed, bool shuffle,
       const DataShare& share)
      : file_(token_file), batch_(batch), seed_(seed), shuffle_(shuffle), share_(share) {
    check(share.rank >= 0 && share.rank < share.world_size, ErrorCode::kUsage,
          "data loader: rank {} of {}", share.rank, share.world_size);
    check(batch.micro_batch_size >= 1 && batch.sequence_length >= 1, ErrorCode::kUsage,
          "data loader: micro-batches of {} x {} tokens", batch.micro_batch_size,
          batch.sequence_length);
    start_epoch(0);
  }

  int64_t rows_per_epoch() const { return ceil_div(tokens(), batch_.sequence_length); }
  int64_t tokens() const { return file_.info().token_count; }
  int64_t vocab_size() const { return file_.info().vocab_size; }
  const DataPosition& position() const { return position_; }

  void seek(const DataPosition& position) {
    check(position.epoch >= 0 && position.row >= 0 && position.row <= rows_per_epoch(),
          ErrorCode::kInvalidData, "data loader: position epoch {}, row {}; an epoch has {} rows",
          position.epoch, position.row, rows_per_epoch());
    start_epoch(position.epoch);
    position_.row = position.row;
  }

  MicroBatch next() {
    MicroBatch batch;
    batch.cu_seqlens.push_back(0);
    skip_rows(share_.rank * batch_.micro_batch_size);
    for (int64_t i = 0; i < batch_.micro_batch_size; ++i) {
      if (position_.row == rows_per_epoch()) start_epoch(position_.epoch + 1);
      append_row(batch, position_.row);
      ++position_.row;
    }
    skip_rows((share_.world_size - 1 - share_.rank) * batch_.micro_batch_size);
    return batch;
  }

 private:
  void skip_rows(int64_t rows) {
    for (; rows > rows_per_epoch() - position_.row; start_epoch(position_.epoch + 1)) {
      rows -= rows_per_epoch() - position_.row;
    }
    position_.row += rows;
  }

  // Lays the documents of an epoch end to end in its order.
  void start_epoch(int64_t epoch) {
    const std::span<const int64_t> begins = file_.document_begins();
    order_.resize(begins.size());
    std::iota(order_.begin(), order_.end(), int64_t{0});
    if (shuffle_) {
      RandomBits random(seed_ ^ (static_cast<uint64_t>(epoch) * 0xd1342543de82ef95u));
      for (size_t i = order_.size(); i > 1; --i) std::swap(order_[i - 1], order_[random.below(i)]);
    }
    stream_begins_.assign(1, 0);
    for (const int64_t document : order_) {
      stream_begins_.push_back(stream_begins_.back() + document_tokens(document));
    }
    position_ = {epoch, 0};
  }

  int64_t document_begin(int64_t document) const {
    return file_.document_begins()[static_cast<size_t>(document)];
  }
  int64_t document_tokens(int64_t document) const {
    const std::span<const int64_t> begins = file_.document_begins();
    const size_t next = static_cast<size_t>(document) + 1;
    return (next < begins.size() ? begins[next] : tokens()) - document_begin(document);
  }

  // Tokens [row * T, (row + 1) * T) of the epoch's stream; every piece of a document is a sequence.
  void append_row(MicroBatch& batch, int64_t row) {
    int64_t at = row * batch_.sequence_length;
    const int64_t end = at + batch_.sequence_length;
    const int64_t stream_end = std::min(end, tokens());
    auto piece = std::upper_bound(stream_begins_.begin(), stream_begins_.end(), at) - 1;
    for (; at < stream_end; ++piece) {
      const int64_t document = order_[static_cast<size_t>(piece - stream_begins_.begin())];
      const int64_t count = std::min(stream_end, *(piece + 1)) - at;
      append_piece(batch, document_begin(document) + (at - *piece), count);
      at += count;
    }
    if (at < end) {
      batch.tokens.insert(batch.tokens.end(), static_cast<size_t>(end - at), kPaddingToken);
      batch.labels.insert(batch.labels.end(), static_cast<size_t>(end - at), kIgnoredLabel);
      batch.cu_seqlens.push_back(static_cast<int32_t>(batch.tokens.size()));
    }
  }

  // Each token predicts the next one of its piece, unless the loss mask leaves that out.
  void append_piece(MicroBatch& batch, int64_t first, int64_t count) {
    const size_t size = static_cast<size_t>(count);
    const size_t begin = batch.tokens.size();
    batch.tokens.resize(begin + size);
    file_.read(first, std::span(batch.tokens).subspan(begin, size));
    mask_.resize(size);
    file_.read_loss_mask(first, mask_);
    for (size_t i = 0; i < size; ++i) {
      const bool counts = i + 1 < size && mask_[i + 1] != 0;
      batch.labels.push_back(counts ? batch.tokens[begin + i + 1] : kIgnoredLabel);
    }
    batch.cu_seqlens.push_back(static_cast<int32_t>(batch.tokens.size()));
  }

  TokenFile file_;
  BatchConfig batch_;
  uint64_t seed_;
  bool shuffle_;
  DataShare share_;
  DataPosition position_;
  std::vector<int64_t> order_;          // documents in the order of this epoch
  std::vector<int64_t> stream_begins_;  // first token of each in the epoch's stream, and its end
  std::vector<uint8_t> mask_;
};

DataLoader::DataLoader(const std::string& token_file, const BatchConfig& batch, uint64_t seed,
                       bool shuffle, const DataShare& share)
    : impl_(std::make_unique<Impl>(token_file, batch, seed, shuffle, share)) {}
DataLoader::~DataLoader() = default;

int64_t DataLoader::rows_per_epoch() const { return impl_->rows_per_epoch(); }
int64_t DataLoader::tokens() const { return impl_->tokens(); }
int64_t DataLoader::vocab_size() const { return impl_->vocab_size(); }
MicroBatch DataLoader::next() { return impl_->next(); }
DataPosition DataLoader::position() const { return impl_->position(); }
void DataLoader::seek(const DataPosition& position) { impl_->seek(position); }

}  // namespace orlop
