#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <vector>

#include "base/unique_fd.h"
#include "formats/xxh3_stream.h"

namespace orlop {

// A .tok file: token ids of many documents, one after another. All numbers are little-endian; every
// section begins at a multiple of 64 bytes, the bytes between are zero, and the file ends with its
// last section's padding.
//
//   offset  bytes  header (64 bytes)
//        0      8  magic "ORLOPTOK"
//        8      4  version, 1
//       12      4  bytes of one token, 2 or 4
//       16      8  number of tokens, at least 1
//       24      8  vocabulary size; every token is below it
//       32      8  flags: 1 document offsets follow, 2 a loss mask follows; others must be 0
//       40      8  number of documents (0 without document offsets)
//       48      8  XXH3-64 of the tokenizer's file, 0 when unknown
//       56      8  XXH3-64 of everything behind the header
//
//   tokens            u16 or u32 each
//   document offsets  u64 each: position of the first token of every document; the first is 0, each
//   is
//                     greater than the one before
//   loss mask         one bit per token, lowest bit first: 1 when the token counts as a label
struct TokenFileInfo {
  size_t token_bytes = 2;
  int64_t token_count = 0;
  int64_t vocab_size = 0;  // 0 when unknown (llm.c)
  bool has_loss_mask = false;
  uint64_t tokenizer_hash = 0;
};

// Reads .tok files and the token files of llm.c (magic 20240520 with 16-bit and 20240801 with
// 32-bit tokens behind a header of 256 int32). Thread-safe.
class TokenFile {
 public:
  // Throws Error(kInvalidData) with the field for anything malformed, and for a file whose
  // vocabulary is larger than `model_vocab`, when that is given.
  explicit TokenFile(std::filesystem::path path, std::optional<int64_t> model_vocab = std::nullopt);

  const TokenFileInfo& info() const { return info_; }
  // Positions of the first tokens of the documents; {0} when the file does not say.
  std::span<const int64_t> document_begins() const { return document_begins_; }

  // Tokens [first, first + out.size()). An id that is not below the vocabulary is an
  // Error(kInvalidData) with its position.
  void read(int64_t first, std::span<int32_t> out) const;

  // 1 where the token counts as a label; all 1 without a mask.
  void read_loss_mask(int64_t first, std::span<uint8_t> out) const;

  // Reads everything and compares the hash. True for llm.c files, which have none.
  bool verify_hash() const;

 private:
  void parse_tok_header(std::span<const std::byte> header, size_t file_bytes);
  void parse_llmc_header(std::span<const std::byte> header, size_t file_bytes);
  void read_document_begins(int64_t document_count);
  void check_range(int64_t first, size_t count) const;
  template <typename T>
  void read_as(int64_t first, std::span<int32_t> out) const;

  std::filesystem::path path_;
  UniqueFd fd_;
  TokenFileInfo info_;
  int64_t id_limit_ = 0;  // ids must be below
  size_t file_bytes_ = 0;
  size_t tokens_offset_ = 0;
  size_t documents_offset_ = 0;
  size_t mask_offset_ = 0;
  std::optional<uint64_t> hash_;
  std::vector<int64_t> document_begins_;
};

// Writes a .tok file document by document. Nothing appears under `path` before finish().
class TokenFileWriter {
 public:
  struct Options {
    int64_t vocab_size = 0;  // decides 16 or 32 bits per token
    bool loss_mask = false;
    uint64_t tokenizer_hash = 0;
  };

  TokenFileWriter(std::filesystem::path path, const Options& options);
  ~TokenFileWriter();
  TokenFileWriter(const TokenFileWriter&) = delete;
  TokenFileWriter& operator=(const TokenFileWriter&) = delete;

  // Appends one document; an empty one is left out. `loss_mask` has one byte (0 or 1) per token, or
  // is empty: every token counts. Throws Error(kInvalidData) for an id beyond the vocabulary.
  void append(std::span<const int32_t> tokens, std::span<const uint8_t> loss_mask = {});

  // Throws Error(kInvalidData) when no token was written.
  TokenFileInfo finish();

 private:
  void append_bytes(std::span<const std::byte> bytes);
  void flush();
  void pad_section();

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  Options options_;
  UniqueFd fd_;
  TokenFileInfo info_;
  std::vector<std::byte> buffer_;
  size_t offset_ = 0;  // in the file, of the buffer's first byte
  std::vector<uint64_t> document_begins_;
  std::vector<uint8_t> mask_bits_;
  Xxh3Stream hash_;
  bool published_ = false;
};

}  // namespace orlop
