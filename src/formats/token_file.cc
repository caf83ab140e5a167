#include "formats/token_file.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "formats/file_io.h"

namespace orlop {
namespace {

static_assert(std::endian::native == std::endian::little, "files are read as little-endian");

constexpr size_t kSectionAlignment = 64;
constexpr char kMagic[8] = {'O', 'R', 'L', 'O', 'P', 'T', 'O', 'K'};
constexpr uint32_t kVersion = 1;
constexpr uint64_t kFlagDocuments = 1;
constexpr uint64_t kFlagLossMask = 2;

struct TokHeader {
  char magic[8];
  uint32_t version;
  uint32_t token_bytes;
  uint64_t token_count;
  uint64_t vocab_size;
  uint64_t flags;
  uint64_t document_count;
  uint64_t tokenizer_hash;
  uint64_t hash;
};
static_assert(sizeof(TokHeader) == kSectionAlignment);

constexpr size_t kLlmcHeaderBytes = 256 * sizeof(int32_t);
constexpr uint32_t kLlmcMagic16 = 20240520;
constexpr uint32_t kLlmcMagic32 = 20240801;

// Ids are handed out as int32_t.
constexpr int64_t kMaxVocab = std::numeric_limits<int32_t>::max();
// Far above any corpus, and small enough that byte counts cannot overflow.
constexpr uint64_t kMaxTokens = uint64_t{1} << 56;

size_t mask_bytes(int64_t token_count) { return (static_cast<size_t>(token_count) + 7) / 8; }

}  // namespace

TokenFile::TokenFile(std::filesystem::path path, std::optional<int64_t> model_vocab)
    : path_(std::move(path)), fd_(open_for_reading(path_)) {
  file_bytes_ = file_bytes(fd_, path_);
  std::vector<std::byte> header(std::min(file_bytes_, kLlmcHeaderBytes));
  read_at(fd_, path_, 0, header);
  if (header.size() >= sizeof(TokHeader) && std::memcmp(header.data(), kMagic, 8) == 0) {
    parse_tok_header(header, file_bytes_);
  } else {
    parse_llmc_header(header, file_bytes_);
  }
  if (model_vocab) {
    check(info_.vocab_size <= *model_vocab, ErrorCode::kInvalidData,
          "'{}' was made for a vocabulary of {} tokens, the model has {}", path_.string(),
          info_.vocab_size, *model_vocab);
    id_limit_ = info_.vocab_size > 0 ? info_.vocab_size : *model_vocab;
  } else {
    id_limit_ = info_.vocab_size > 0 ? info_.vocab_size : kMaxVocab;
  }
}

void TokenFile::parse_tok_header(std::span<const std::byte> bytes, size_t file_bytes) {
  TokHeader header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  const std::string file = path_.string();
  check(header.version == kVersion, ErrorCode::kInvalidData,
        "'{}' has token file version {}, this Orlop reads version {}", file, header.version,
        kVersion);
  check(header.token_bytes == 2 || header.token_bytes == 4, ErrorCode::kInvalidData,
        "'{}': {} bytes per token, must be 2 or 4", file, header.token_bytes);
  check(header.token_count > 0 && header.token_count <= kMaxTokens, ErrorCode::kInvalidData,
        "'{}': {} tokens, must be 1 to {}", file, header.token_count, kMaxTokens);
  check(header.vocab_size > 0 && header.vocab_size <= static_cast<uint64_t>(kMaxVocab),
        ErrorCode::kInvalidData, "'{}': vocabulary of {}, must be 1 to {}", file, header.vocab_size,
        kMaxVocab);
  check((header.flags & ~(kFlagDocuments | kFlagLossMask)) == 0, ErrorCode::kInvalidData,
        "'{}': unknown flags {:#x}", file, header.flags);
  const bool has_documents = (header.flags & kFlagDocuments) != 0;
  check(has_documents ? header.document_count > 0 && header.document_count <= header.token_count
                      : header.document_count == 0,
        ErrorCode::kInvalidData, "'{}': {} documents of {} tokens", file, header.document_count,
        header.token_count);

  info_ = {header.token_bytes, static_cast<int64_t>(header.token_count),
           static_cast<int64_t>(header.vocab_size), (header.flags & kFlagLossMask) != 0,
           header.tokenizer_hash};
  hash_ = header.hash;
  tokens_offset_ = sizeof(TokHeader);
  documents_offset_ =
      tokens_offset_ + align_up(header.token_count * header.token_bytes, kSectionAlignment);
  mask_offset_ =
      documents_offset_ + align_up(header.document_count * sizeof(uint64_t), kSectionAlignment);
  const size_t expected =
      mask_offset_ +
      (info_.has_loss_mask ? align_up(mask_bytes(info_.token_count), kSectionAlignment) : 0);
  check(file_bytes == expected, ErrorCode::kInvalidData,
        "'{}' has {} bytes, its header (tokens {}, documents {}) asks for {}", file, file_bytes,
        header.token_count, header.document_count, expected);
  read_document_begins(static_cast<int64_t>(header.document_count));
}

void TokenFile::parse_llmc_header(std::span<const std::byte> bytes, size_t file_bytes) {
  uint32_t words[3] = {};
  if (bytes.size() == kLlmcHeaderBytes) std::memcpy(words, bytes.data(), sizeof(words));
  const auto [magic, version, count] = words;
  check(magic == kLlmcMagic16 || magic == kLlmcMagic32, ErrorCode::kInvalidData,
        "'{}' ({} bytes) is no token file: it begins neither with ORLOPTOK nor with a magic number "
        "of llm.c ({} or {})",
        path_.string(), file_bytes, kLlmcMagic16, kLlmcMagic32);
  const uint32_t known_version = magic == kLlmcMagic16 ? 1 : 7;
  check(version == known_version, ErrorCode::kInvalidData,
        "'{}': version {} of the llm.c format {}, only {} is read", path_.string(), version, magic,
        known_version);
  check(count > 0 && count <= static_cast<uint32_t>(std::numeric_limits<int32_t>::max()),
        ErrorCode::kInvalidData, "'{}': {} tokens, must be 1 to 2147483647", path_.string(), count);
  info_.token_bytes = magic == kLlmcMagic16 ? 2 : 4;
  info_.token_count = count;
  tokens_offset_ = kLlmcHeaderBytes;
  const size_t expected = tokens_offset_ + count * info_.token_bytes;
  check(file_bytes == expected, ErrorCode::kInvalidData,
        "'{}' has {} bytes, its header ({} tokens of {} bytes) asks for {}", path_.string(),
        file_bytes, count, info_.token_bytes, expected);
  document_begins_ = {0};
}

void TokenFile::read_document_begins(int64_t document_count) {
  document_begins_.assign(static_cast<size_t>(std::max<int64_t>(document_count, 1)), 0);
  if (document_count == 0) return;
  read_at(fd_, path_, documents_offset_, std::as_writable_bytes(std::span(document_begins_)));
  for (size_t i = 0; i < document_begins_.size(); ++i) {
    const int64_t begin = document_begins_[i];
    const bool in_order = i == 0 ? begin == 0 : begin > document_begins_[i - 1];
    check(in_order && begin < info_.token_count, ErrorCode::kInvalidData,
          "'{}': document {} begins at token {}, which is not behind the document before it or not "
          "below {} tokens",
          path_.native(), i, begin, info_.token_count);
  }
}

void TokenFile::check_range(int64_t first, size_t count) const {
  ORLOP_INVARIANT(first >= 0 && first <= info_.token_count &&
                  count <= static_cast<size_t>(info_.token_count - first));
}

template <typename T>
void TokenFile::read_as(int64_t first, std::span<int32_t> out) const {
  constexpr size_t kChunk = 16384;
  T chunk[kChunk];
  for (size_t done = 0; done < out.size();) {
    const size_t count = std::min(kChunk, out.size() - done);
    const size_t position = static_cast<size_t>(first) + done;
    read_at(fd_, path_, tokens_offset_ + position * sizeof(T),
            std::as_writable_bytes(std::span(chunk, count)));
    for (size_t i = 0; i < count; ++i) {
      if (static_cast<int64_t>(chunk[i]) >= id_limit_) [[unlikely]] {
        fail(ErrorCode::kInvalidData,
             "'{}': token {} has id {}, which is not below the vocabulary of {}", path_.string(),
             position + i, chunk[i], id_limit_);
      }
      out[done + i] = static_cast<int32_t>(chunk[i]);
    }
    done += count;
  }
}

void TokenFile::read(int64_t first, std::span<int32_t> out) const {
  check_range(first, out.size());
  if (info_.token_bytes == 2) {
    read_as<uint16_t>(first, out);
  } else {
    read_as<uint32_t>(first, out);
  }
}

void TokenFile::read_loss_mask(int64_t first, std::span<uint8_t> out) const {
  check_range(first, out.size());
  if (!info_.has_loss_mask || out.empty()) {
    std::fill(out.begin(), out.end(), uint8_t{1});
    return;
  }
  const size_t begin = static_cast<size_t>(first);
  const size_t first_byte = begin / 8;
  std::vector<uint8_t> bits((begin + out.size() - 1) / 8 - first_byte + 1);
  read_at(fd_, path_, mask_offset_ + first_byte, std::as_writable_bytes(std::span(bits)));
  for (size_t i = 0; i < out.size(); ++i) {
    const size_t bit = begin + i - first_byte * 8;
    out[i] = static_cast<uint8_t>((bits[bit / 8] >> (bit % 8)) & 1u);
  }
}

bool TokenFile::verify_hash() const {
  if (!hash_) return true;
  Xxh3Stream hash;
  update_xxh3(hash, fd_, path_, sizeof(TokHeader), file_bytes_);
  return hash.digest() == *hash_;
}

TokenFileWriter::TokenFileWriter(std::filesystem::path path, const Options& options)
    : path_(std::move(path)), temporary_(path_.string() + ".tmp"), options_(options) {
  check(options.vocab_size > 0 && options.vocab_size <= kMaxVocab, ErrorCode::kInvalidData,
        "'{}': vocabulary of {}, must be 1 to {}", path_.string(), options.vocab_size, kMaxVocab);
  info_.token_bytes = options.vocab_size <= 65536 ? 2 : 4;
  info_.vocab_size = options.vocab_size;
  info_.has_loss_mask = options.loss_mask;
  info_.tokenizer_hash = options.tokenizer_hash;
  fd_ = open_for_writing(temporary_);
  offset_ = sizeof(TokHeader);
}

TokenFileWriter::~TokenFileWriter() {
  if (!published_) ::unlink(temporary_.c_str());
}

void TokenFileWriter::append(std::span<const int32_t> tokens, std::span<const uint8_t> loss_mask) {
  ORLOP_INVARIANT(loss_mask.empty() || loss_mask.size() == tokens.size());
  if (tokens.empty()) return;
  for (size_t i = 0; i < tokens.size(); ++i) {
    check(tokens[i] >= 0 && tokens[i] < info_.vocab_size, ErrorCode::kInvalidData,
          "'{}': document {}, token {} has id {}, which is not below the vocabulary of {}",
          path_.native(), document_begins_.size(), i, tokens[i], info_.vocab_size);
  }
  document_begins_.push_back(static_cast<uint64_t>(info_.token_count));
  for (const int32_t token : tokens) {
    append_bytes(std::as_bytes(std::span(&token, 1)).first(info_.token_bytes));
  }
  if (options_.loss_mask) {
    const size_t begin = static_cast<size_t>(info_.token_count);
    mask_bits_.resize(mask_bytes(info_.token_count + static_cast<int64_t>(tokens.size())));
    for (size_t i = 0; i < tokens.size(); ++i) {
      const bool counts = loss_mask.empty() || loss_mask[i] != 0;
      if (counts) {
        mask_bits_[(begin + i) / 8] |= static_cast<uint8_t>(1u << ((begin + i) % 8));
      }
    }
  }
  info_.token_count += static_cast<int64_t>(tokens.size());
}

TokenFileInfo TokenFileWriter::finish() {
  check(info_.token_count > 0, ErrorCode::kInvalidData, "'{}': there is no token to write",
        path_.string());
  pad_section();
  append_bytes(std::as_bytes(std::span(document_begins_)));
  pad_section();
  if (options_.loss_mask) {
    append_bytes(std::as_bytes(std::span(mask_bits_)));
    pad_section();
  }
  flush();
  TokHeader header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.version = kVersion;
  header.token_bytes = static_cast<uint32_t>(info_.token_bytes);
  header.token_count = static_cast<uint64_t>(info_.token_count);
  header.vocab_size = static_cast<uint64_t>(info_.vocab_size);
  header.flags = kFlagDocuments | (options_.loss_mask ? kFlagLossMask : 0);
  header.document_count = document_begins_.size();
  header.tokenizer_hash = info_.tokenizer_hash;
  header.hash = hash_.digest();
  write_at(fd_, temporary_, 0, std::as_bytes(std::span(&header, 1)));
  sync_file(fd_, temporary_);
  rename_durably(temporary_, path_);
  published_ = true;
  return info_;
}

void TokenFileWriter::append_bytes(std::span<const std::byte> bytes) {
  buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
  if (buffer_.size() >= kMiB) flush();
}

void TokenFileWriter::flush() {
  write_at(fd_, temporary_, offset_, buffer_);
  hash_.update(buffer_);
  offset_ += buffer_.size();
  buffer_.clear();
}

void TokenFileWriter::pad_section() {
  const size_t end = offset_ + buffer_.size();
  buffer_.resize(buffer_.size() + align_up(end, kSectionAlignment) - end);
}

}  // namespace orlop
