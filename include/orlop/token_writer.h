#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "orlop/export.h"

namespace orlop {

struct TokenWriterConfig {
  int64_t vocab_size = 0;           // every id is below it; decides 16 or 32 bits per token
  bool loss_mask = false;           // whether the file says which tokens count as labels
  std::string tokenizer_file = {};  // its hash goes into the header; empty: unknown
};

// Writes a token file (.tok) for DataLoader, document by document. Nothing appears under `path`
// before finish(); a writer that is dropped before leaves nothing behind.
class ORLOP_EXPORT TokenWriter {
 public:
  TokenWriter(const std::string& path, const TokenWriterConfig& config);
  ~TokenWriter();

  // Appends one document; an empty one is left out. `loss_mask` has one byte (0 or 1) per token, or
  // is empty: every token counts. Throws Error(kInvalidData) for an id beyond the vocabulary.
  void append(std::span<const int32_t> tokens, std::span<const uint8_t> loss_mask = {});

  // Throws Error(kInvalidData) when no token was written.
  void finish();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

struct TokenFileSummary {
  int64_t tokens = 0;
  int64_t documents = 0;
  int64_t vocab_size = 0;  // 0: the file does not say
  int bits_per_token = 0;
  bool has_loss_mask = false;
  bool hash_matches = false;  // read in whole and compared; true where the format has no hash
};

// What a token file (.tok, or one of llm.c) holds. Throws Error(kInvalidData) for anything
// malformed.
ORLOP_EXPORT TokenFileSummary describe_token_file(const std::string& path);

}  // namespace orlop
