#include "orlop/token_writer.h"

#include "base/check.h"
#include "formats/file_io.h"
#include "formats/token_file.h"
#include "formats/xxh3_stream.h"

namespace orlop {
namespace {

uint64_t file_hash(const std::string& path) {
  if (path.empty()) return 0;
  const UniqueFd fd = open_for_reading(path);
  Xxh3Stream hash;
  update_xxh3(hash, fd, path, 0, file_bytes(fd, path));
  return hash.digest();
}

}  // namespace

class TokenWriter::Impl {
 public:
  Impl(const std::string& path, const TokenWriterConfig& config)
      : path_(path),
        writer_(path, {.vocab_size = config.vocab_size,
                       .loss_mask = config.loss_mask,
                       .tokenizer_hash = file_hash(config.tokenizer_file)}) {}

  void append(std::span<const int32_t> tokens, std::span<const uint8_t> loss_mask) {
    check(!finished_, ErrorCode::kUsage, "'{}': append after finish", path_);
    check(loss_mask.empty() || loss_mask.size() == tokens.size(), ErrorCode::kUsage,
          "'{}': a loss mask of {} for a document of {} tokens", path_, loss_mask.size(),
          tokens.size());
    writer_.append(tokens, loss_mask);
  }

  void finish() {
    check(!finished_, ErrorCode::kUsage, "'{}': finish was called twice", path_);
    writer_.finish();
    finished_ = true;
  }

 private:
  std::string path_;
  TokenFileWriter writer_;
  bool finished_ = false;
};

TokenWriter::TokenWriter(const std::string& path, const TokenWriterConfig& config)
    : impl_(std::make_unique<Impl>(path, config)) {}
TokenWriter::~TokenWriter() = default;

void TokenWriter::append(std::span<const int32_t> tokens, std::span<const uint8_t> loss_mask) {
  impl_->append(tokens, loss_mask);
}
void TokenWriter::finish() { impl_->finish(); }

TokenFileSummary describe_token_file(const std::string& path) {
  const TokenFile file(path);
  const TokenFileInfo& info = file.info();
  return {.tokens = info.token_count,
          .documents = static_cast<int64_t>(file.document_begins().size()),
          .vocab_size = info.vocab_size,
          .bits_per_token = static_cast<int>(8 * info.token_bytes),
          .has_loss_mask = info.has_loss_mask,
          .hash_matches = file.verify_hash()};
}

}  // namespace orlop
