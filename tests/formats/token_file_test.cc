#include "formats/token_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "tests/formats/support.h"

namespace orlop {
namespace {

using test::error_of;
using test::slurp;
using test::spill;
using test::TempFolder;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<int32_t> read_tokens(const TokenFile& file) {
  std::vector<int32_t> tokens(static_cast<size_t>(file.info().token_count));
  file.read(0, tokens);
  return tokens;
}

TEST(TokenFile, TheBytesAreAsSpecified) {
  const TempFolder folder;
  TokenFileWriter writer(folder / "x.tok",
                         {.vocab_size = 1000, .loss_mask = true, .tokenizer_hash = 0x1122});
  writer.append(std::vector<int32_t>{1, 2, 999}, std::vector<uint8_t>{0, 1, 1});
  writer.append({});
  writer.append(std::vector<int32_t>{513});
  EXPECT_THAT(folder.names(), ElementsAre("x.tok.tmp"));
  writer.finish();
  EXPECT_THAT(folder.names(), ElementsAre("x.tok"));

  const std::string bytes = slurp(folder / "x.tok");
  ASSERT_EQ(bytes.size(), 4u * 64);
  const auto number = [&](size_t offset, size_t width) {
    uint64_t value = 0;
    std::memcpy(&value, bytes.data() + offset, width);
    return value;
  };
  EXPECT_EQ(bytes.substr(0, 8), "ORLOPTOK");
  EXPECT_EQ(number(8, 4), 1u);
  EXPECT_EQ(number(12, 4), 2u);
  EXPECT_EQ(number(16, 8), 4u);
  EXPECT_EQ(number(24, 8), 1000u);
  EXPECT_EQ(number(32, 8), 3u);
  EXPECT_EQ(number(40, 8), 2u);
  EXPECT_EQ(number(48, 8), 0x1122u);
  EXPECT_EQ(number(64, 8), 0x0201'03e7'0002'0001u);
  EXPECT_EQ(number(128, 8), 0u);
  EXPECT_EQ(number(136, 8), 3u);
  EXPECT_EQ(number(192, 1), 0b1110u);
}

TEST(TokenFile, ReadsItsOwnFiles) {
  const TempFolder folder;
  {
    TokenFileWriter writer(folder / "x.tok", {.vocab_size = 70000, .loss_mask = true});
    writer.append(std::vector<int32_t>{69999, 0, 5}, std::vector<uint8_t>{1, 0, 1});
    writer.append(std::vector<int32_t>{6, 7});
    const TokenFileInfo info = writer.finish();
    EXPECT_EQ(info.token_count, 5);
    EXPECT_EQ(info.token_bytes, 4u);
  }
  const TokenFile file(folder / "x.tok", 70000);
  EXPECT_EQ(file.info().token_count, 5);
  EXPECT_EQ(file.info().vocab_size, 70000);
  EXPECT_THAT(read_tokens(file), ElementsAre(69999, 0, 5, 6, 7));
  EXPECT_THAT(file.document_begins(), ElementsAre(0, 3));
  EXPECT_TRUE(file.verify_hash());
  std::vector<int32_t> two(2);
  file.read(3, two);
  EXPECT_THAT(two, ElementsAre(6, 7));
  std::vector<uint8_t> mask(3);
  file.read_loss_mask(1, mask);
  EXPECT_THAT(mask, ElementsAre(0, 1, 1));
  error_of(ErrorCode::kInternal, [&] { file.read(4, two); });
  error_of(ErrorCode::kInternal, [&] { file.read(-1, two); });
}

// Documents of any length and masks come back from any window.
RC_GTEST_PROP(TokenFileProperty, RoundTrip, ()) {
  const auto vocab = *rc::gen::element<int64_t>(2, 65536, 65537, 2147483647);
  const bool masked = *rc::gen::arbitrary<bool>();
  const auto lengths =
      *rc::gen::nonEmpty(rc::gen::container<std::vector<size_t>>(rc::gen::inRange<size_t>(1, 300)));
  const TempFolder folder;
  TokenFileWriter writer(folder / "x.tok", {.vocab_size = vocab, .loss_mask = masked});
  std::vector<int32_t> tokens;
  std::vector<uint8_t> mask;
  std::vector<int64_t> begins;
  for (const size_t length : lengths) {
    const auto ids = *rc::gen::container<std::vector<int32_t>>(
        length, rc::gen::inRange<int32_t>(0, static_cast<int32_t>(vocab - 1)));
    const auto bits =
        *rc::gen::container<std::vector<uint8_t>>(length, rc::gen::inRange<uint8_t>(0, 2));
    writer.append(ids, bits);
    begins.push_back(static_cast<int64_t>(tokens.size()));
    tokens.insert(tokens.end(), ids.begin(), ids.end());
    mask.insert(mask.end(), bits.begin(), bits.end());
  }
  writer.finish();
  const TokenFile file(folder / "x.tok", vocab);
  RC_ASSERT(read_tokens(file) == tokens);
  RC_ASSERT(std::equal(begins.begin(), begins.end(), file.document_begins().begin(),
                       file.document_begins().end()));
  RC_ASSERT(file.verify_hash());
  const auto first = *rc::gen::inRange<size_t>(0, tokens.size());
  const auto count = *rc::gen::inRange<size_t>(0, tokens.size() - first + 1);
  std::vector<uint8_t> window(count);
  file.read_loss_mask(static_cast<int64_t>(first), window);
  for (size_t i = 0; i < count; ++i) RC_ASSERT(window[i] == (masked ? mask[first + i] : 1));
}

TEST(TokenFile, ManyTokensCrossTheBuffers) {
  const TempFolder folder;
  std::vector<int32_t> tokens(700'001);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i * 7919 % 65521);
  TokenFileWriter writer(folder / "x.tok", {.vocab_size = 65521});
  writer.append(tokens);
  writer.finish();
  EXPECT_EQ(read_tokens(TokenFile(folder / "x.tok")), tokens);
}

TEST(TokenFile, NothingOrBadIdsAreNotWritten) {
  const TempFolder folder;
  {
    TokenFileWriter writer(folder / "x.tok", {.vocab_size = 10});
    EXPECT_THAT(error_of(ErrorCode::kInvalidData, [&] { writer.finish(); }),
                HasSubstr("no token to write"));
    writer.append(std::vector<int32_t>{1});
    EXPECT_THAT(
        error_of(ErrorCode::kInvalidData,
                 [&] {
                   writer.append(std::vector<int32_t>{9, 10});
                 }),
        HasSubstr("document 1, token 1 has id 10, which is not below the vocabulary of 10"));
    error_of(ErrorCode::kInvalidData, [&] { writer.append(std::vector<int32_t>{-1}); });
  }
  EXPECT_THAT(folder.names(), IsEmpty());
  error_of(ErrorCode::kInvalidData, [&] { TokenFileWriter(folder / "x.tok", {.vocab_size = 0}); });
}

class DamagedTokenFileTest : public ::testing::Test {
 protected:
  DamagedTokenFileTest() {
    TokenFileWriter writer(folder_ / "x.tok", {.vocab_size = 100, .loss_mask = true});
    writer.append(std::vector<int32_t>{1, 2, 99});
    writer.append(std::vector<int32_t>{4});
    writer.finish();
    good_ = slurp(folder_ / "x.tok");
  }
  // Writes the file with `width` bytes at `offset` set to `value`.
  void damage(size_t offset, size_t width, uint64_t value) {
    std::string bytes = good_;
    std::memcpy(bytes.data() + offset, &value, width);
    spill(folder_ / "x.tok", bytes);
  }
  std::string refusal() {
    return error_of(ErrorCode::kInvalidData, [&] { TokenFile{folder_ / "x.tok"}; });
  }
  TempFolder folder_;
  std::string good_;
};

TEST_F(DamagedTokenFileTest, EveryHeaderFieldIsChecked) {
  damage(0, 1, 'X');
  EXPECT_THAT(refusal(), HasSubstr("is no token file"));
  damage(8, 4, 2);
  EXPECT_THAT(refusal(), HasSubstr("version 2, this Orlop reads version 1"));
  damage(12, 4, 3);
  EXPECT_THAT(refusal(), HasSubstr("3 bytes per token"));
  damage(16, 8, 0);
  EXPECT_THAT(refusal(), HasSubstr("0 tokens"));
  damage(16, 8, UINT64_MAX);
  EXPECT_THAT(refusal(), HasSubstr("18446744073709551615 tokens"));
  damage(16, 8, 40);
  EXPECT_THAT(refusal(), HasSubstr("has 256 bytes, its header (tokens 40, documents 2) asks for"));
  damage(24, 8, 0);
  EXPECT_THAT(refusal(), HasSubstr("vocabulary of 0"));
  damage(32, 8, 4);
  EXPECT_THAT(refusal(), HasSubstr("unknown flags 0x4"));
  damage(32, 8, 2);
  EXPECT_THAT(refusal(), HasSubstr("2 documents of 4 tokens"));
  damage(40, 8, 0);
  EXPECT_THAT(refusal(), HasSubstr("0 documents"));
  damage(40, 8, 5);
  EXPECT_THAT(refusal(), HasSubstr("5 documents of 4 tokens"));
}

TEST_F(DamagedTokenFileTest, DocumentOffsetsAreChecked) {
  damage(128, 8, 1);
  EXPECT_THAT(refusal(), HasSubstr("document 0 begins at token 1"));
  damage(136, 8, 0);
  EXPECT_THAT(refusal(), HasSubstr("document 1 begins at token 0"));
  damage(136, 8, 4);
  EXPECT_THAT(refusal(), HasSubstr("document 1 begins at token 4"));
  damage(136, 8, UINT64_MAX);
  refusal();
}

TEST_F(DamagedTokenFileTest, LengthIsExact) {
  spill(folder_ / "x.tok", good_.substr(0, good_.size() - 1));
  EXPECT_THAT(refusal(), HasSubstr("has 255 bytes"));
  spill(folder_ / "x.tok", good_ + "x");
  EXPECT_THAT(refusal(), HasSubstr("has 257 bytes"));
  for (const size_t length : {0u, 1u, 8u, 63u, 64u}) {
    spill(folder_ / "x.tok", good_.substr(0, length));
    refusal();
  }
}

TEST_F(DamagedTokenFileTest, IdsAndHashAreChecked) {
  damage(66, 2, 100);
  const TokenFile file(folder_ / "x.tok");
  EXPECT_FALSE(file.verify_hash());
  EXPECT_THAT(error_of(ErrorCode::kInvalidData, [&] { read_tokens(file); }),
              HasSubstr("token 1 has id 100, which is not below the vocabulary of 100"));
}

TEST_F(DamagedTokenFileTest, AVocabularyBeyondTheModelsIsRefused) {
  EXPECT_THAT(error_of(ErrorCode::kInvalidData, [&] { TokenFile(folder_ / "x.tok", 99); }),
              HasSubstr("made for a vocabulary of 100 tokens, the model has 99"));
  TokenFile(folder_ / "x.tok", 100);
}

std::string llmc_file(uint32_t magic, uint32_t version, uint32_t count, const std::string& data) {
  std::vector<uint32_t> header(256);
  header[0] = magic;
  header[1] = version;
  header[2] = count;
  return std::string(reinterpret_cast<const char*>(header.data()), 1024) + data;
}

TEST(TokenFile, ReadsLlmcFiles) {
  const TempFolder folder;
  spill(folder / "a.bin", llmc_file(20240520, 1, 3, std::string("\1\0\2\0\xff\xff", 6)));
  const TokenFile narrow(folder / "a.bin");
  EXPECT_EQ(narrow.info().token_bytes, 2u);
  EXPECT_EQ(narrow.info().vocab_size, 0);
  EXPECT_THAT(read_tokens(narrow), ElementsAre(1, 2, 65535));
  EXPECT_THAT(narrow.document_begins(), ElementsAre(0));
  std::vector<uint8_t> mask(3);
  narrow.read_loss_mask(0, mask);
  EXPECT_THAT(mask, ElementsAre(1, 1, 1));
  const TokenFile bounded(folder / "a.bin", 50257);
  EXPECT_THAT(error_of(ErrorCode::kInvalidData, [&] { read_tokens(bounded); }),
              HasSubstr("token 2 has id 65535, which is not below the vocabulary of 50257"));

  spill(folder / "b.bin", llmc_file(20240801, 7, 1, std::string("\xff\xf3\1\0", 4)));
  EXPECT_THAT(read_tokens(TokenFile(folder / "b.bin", 128256)), ElementsAre(127999));

  const auto refusal = [&](const std::string& bytes) {
    spill(folder / "c.bin", bytes);
    return error_of(ErrorCode::kInvalidData, [&] { TokenFile{folder / "c.bin"}; });
  };
  EXPECT_THAT(refusal(llmc_file(20240520, 2, 1, "xx")), HasSubstr("version 2"));
  EXPECT_THAT(refusal(llmc_file(20240520, 1, 2, "xx")), HasSubstr("has 1026 bytes"));
  EXPECT_THAT(refusal(llmc_file(20240520, 1, 0, "")), HasSubstr("0 tokens"));
  EXPECT_THAT(refusal(llmc_file(20240521, 1, 1, "xx")), HasSubstr("is no token file"));
}

}  // namespace
}  // namespace orlop
