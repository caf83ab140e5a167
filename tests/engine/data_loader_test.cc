#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "orlop/engine.h"
#include "orlop/token_writer.h"
#include "tests/formats/support.h"

namespace orlop::test {
namespace {

constexpr int64_t kVocab = 70000;  // 32 bits per token

struct Document {
  std::vector<int32_t> tokens;
  std::vector<uint8_t> mask;
};

// Every token of the file has an id of its own, so that each can be followed through the batches.
std::vector<Document> make_documents(const std::vector<int>& lengths) {
  std::vector<Document> documents;
  int32_t next = 1;  // 0 is what padding holds
  for (const int length : lengths) {
    Document document;
    for (int i = 0; i < length; ++i) {
      document.mask.push_back(next % 3 != 0);
      document.tokens.push_back(next++);
    }
    documents.push_back(document);
  }
  return documents;
}

class DataLoaderTest : public ::testing::Test {
 protected:
  std::string write(const std::vector<Document>& documents) {
    TokenWriterConfig config;
    config.vocab_size = kVocab;
    config.loss_mask = true;
    const std::string path = (folder_ / "tokens.tok").string();
    TokenWriter writer(path, config);
    for (const Document& document : documents) writer.append(document.tokens, document.mask);
    writer.finish();
    return path;
  }

  std::string write_lengths(const std::vector<int>& lengths) {
    return write(make_documents(lengths));
  }

  // The micro-batch that one rank gets after so many others.
  static MicroBatch single_after(const std::string& path, int count);

  TempFolder folder_;
};

constexpr BatchConfig kBatch{.micro_batch_size = 2, .sequence_length = 8, .accumulation_steps = 1};
const std::vector<int> kLengths = {5, 1, 13, 30, 8, 2, 16, 3};  // 78 tokens, 10 rows

MicroBatch DataLoaderTest::single_after(const std::string& path, int count) {
  DataLoader loader(path, kBatch, 3, true);
  for (int i = 0; i < count; ++i) loader.next();
  return loader.next();
}

struct Epoch {
  std::vector<int32_t> tokens;
  std::vector<int32_t> labels;
  std::vector<int32_t> bounds;  // of documents, over the whole epoch
};

// kLengths has a whole number of micro-batches.
Epoch read_epoch(DataLoader& loader, const BatchConfig& batch = kBatch) {
  Epoch epoch;
  epoch.bounds.push_back(0);
  for (int64_t row = 0; row < loader.rows_per_epoch(); row += batch.micro_batch_size) {
    const MicroBatch made = loader.next();
    EXPECT_EQ(made.tokens.size(),
              static_cast<size_t>(batch.micro_batch_size * batch.sequence_length));
    EXPECT_EQ(made.labels.size(), made.tokens.size());
    EXPECT_EQ(made.cu_seqlens.front(), 0);
    EXPECT_EQ(made.cu_seqlens.back(), static_cast<int32_t>(made.tokens.size()));
    const auto shift = static_cast<int32_t>(epoch.tokens.size());
    for (size_t i = 1; i < made.cu_seqlens.size(); ++i) {
      epoch.bounds.push_back(shift + made.cu_seqlens[i]);
    }
    epoch.tokens.insert(epoch.tokens.end(), made.tokens.begin(), made.tokens.end());
    epoch.labels.insert(epoch.labels.end(), made.labels.begin(), made.labels.end());
  }
  return epoch;
}

TEST_F(DataLoaderTest, GivesEveryTokenOncePerEpochAndPadsTheEnd) {
  DataLoader loader(write_lengths(kLengths), kBatch, 3, true);
  EXPECT_EQ(loader.tokens(), 78);
  EXPECT_EQ(loader.rows_per_epoch(), 10);
  EXPECT_EQ(loader.vocab_size(), kVocab);
  for (int round = 0; round < 3; ++round) {
    EXPECT_EQ(loader.position().epoch, round == 0 ? 0 : round - 1);
    Epoch epoch = read_epoch(loader);
    EXPECT_EQ(epoch.tokens[78], 0);
    EXPECT_EQ(epoch.tokens[79], 0);
    EXPECT_EQ(epoch.labels[78], kIgnoredLabel);
    EXPECT_EQ(epoch.labels[79], kIgnoredLabel);
    EXPECT_EQ(epoch.bounds[epoch.bounds.size() - 2], 78) << "padding is a document of its own";
    epoch.tokens.resize(78);
    std::sort(epoch.tokens.begin(), epoch.tokens.end());
    std::vector<int32_t> all(78);
    std::iota(all.begin(), all.end(), 1);
    EXPECT_EQ(epoch.tokens, all);
  }
}

TEST_F(DataLoaderTest, LabelsAreTheNextTokenOfTheSamePieceWhereTheMaskSaysSo) {
  const std::vector<Document> documents = make_documents(kLengths);
  DataLoader loader(write(documents), kBatch, 3, true);
  const Epoch epoch = read_epoch(loader);
  for (size_t i = 0; i < 78; ++i) {
    const bool piece_ends =
        std::count(epoch.bounds.begin(), epoch.bounds.end(), static_cast<int32_t>(i) + 1) > 0;
    const int32_t next = epoch.tokens[i] + 1;  // ids follow each other inside a document
    const int32_t expected = piece_ends || next % 3 == 0 ? kIgnoredLabel : next;
    EXPECT_EQ(epoch.labels[i], expected) << i;
  }
}

TEST_F(DataLoaderTest, PiecesEndWithTheirDocumentOrTheirRow) {
  const std::vector<Document> documents = make_documents(kLengths);
  DataLoader loader(write(documents), kBatch, 5, true);
  const Epoch epoch = read_epoch(loader);
  std::vector<int32_t> last_tokens;
  for (const Document& document : documents) last_tokens.push_back(document.tokens.back());
  std::vector<int32_t> expected = {0};
  for (int32_t i = 1; i <= 80; ++i) {
    const int32_t before = epoch.tokens[static_cast<size_t>(i) - 1];
    const bool document_ends = std::count(last_tokens.begin(), last_tokens.end(), before) > 0;
    if (i % 8 == 0 || document_ends) expected.push_back(i);
  }
  EXPECT_EQ(epoch.bounds, expected);
}

TEST_F(DataLoaderTest, WithoutShufflingKeepsTheOrderOfTheFile) {
  DataLoader loader(write_lengths(kLengths), kBatch, 3, false);
  for (int round = 0; round < 2; ++round) {
    const Epoch epoch = read_epoch(loader);
    for (int32_t i = 0; i < 78; ++i) EXPECT_EQ(epoch.tokens[static_cast<size_t>(i)], i + 1);
  }
}

TEST_F(DataLoaderTest, ShufflesAnewPerEpochAndSeed) {
  const std::string path = write_lengths(kLengths);
  DataLoader loader(path, kBatch, 3, true);
  DataLoader same(path, kBatch, 3, true);
  DataLoader other(path, kBatch, 4, true);
  const Epoch first = read_epoch(loader);
  const Epoch second = read_epoch(loader);
  EXPECT_NE(first.tokens, second.tokens);
  EXPECT_EQ(read_epoch(same).tokens, first.tokens);
  EXPECT_EQ(read_epoch(same).tokens, second.tokens);
  EXPECT_NE(read_epoch(other).tokens, first.tokens);
}

TEST_F(DataLoaderTest, SeekingContinuesTheStraightRun) {
  BatchConfig batch = kBatch;
  batch.micro_batch_size = 3;  // micro-batches reach over the end of an epoch
  const std::string path = write_lengths(kLengths);
  DataLoader straight(path, batch, 3, true);
  std::vector<DataPosition> positions;
  std::vector<MicroBatch> batches;
  for (int i = 0; i < 9; ++i) {
    positions.push_back(straight.position());
    batches.push_back(straight.next());
  }
  EXPECT_GE(straight.position().epoch, 2);
  for (const size_t from : {8u, 0u, 3u, 4u, 7u}) {
    DataLoader resumed(path, batch, 3, true);
    resumed.next();
    resumed.seek(positions[from]);
    for (size_t i = from; i < batches.size(); ++i) {
      const MicroBatch made = resumed.next();
      EXPECT_EQ(made.tokens, batches[i].tokens) << from << ", " << i;
      EXPECT_EQ(made.labels, batches[i].labels) << from << ", " << i;
      EXPECT_EQ(made.cu_seqlens, batches[i].cu_seqlens) << from << ", " << i;
    }
  }
}

TEST_F(DataLoaderTest, RefusesPositionsAndShapesThatCannotBe) {
  const std::string path = write_lengths(kLengths);
  DataLoader loader(path, kBatch, 3, true);
  const std::string text =
      error_of(ErrorCode::kInvalidData, [&] { loader.seek({.epoch = 1, .row = 11}); });
  EXPECT_NE(text.find("11"), std::string::npos) << text;
  EXPECT_NE(text.find("10 rows"), std::string::npos) << text;
  error_of(ErrorCode::kInvalidData, [&] { loader.seek({.epoch = -1, .row = 0}); });
  BatchConfig empty = kBatch;
  empty.sequence_length = 0;
  error_of(ErrorCode::kUsage, [&] { DataLoader(path, empty, 3, true); });
}

// The end of the last row of an epoch is also the begin of the next epoch.
TEST_F(DataLoaderTest, SeeksToTheEndOfAnEpoch) {
  const std::string path = write_lengths(kLengths);
  DataLoader straight(path, kBatch, 3, true);
  read_epoch(straight);
  DataLoader resumed(path, kBatch, 3, true);
  resumed.seek({.epoch = 0, .row = 10});
  EXPECT_EQ(resumed.next().tokens, straight.next().tokens);
  EXPECT_EQ(resumed.position().epoch, 1);
  EXPECT_EQ(resumed.position().row, 2);
}

TEST_F(DataLoaderTest, AFileShorterThanOneRowIsPadded) {
  DataLoader loader(write_lengths({3}), kBatch, 3, true);
  EXPECT_EQ(loader.rows_per_epoch(), 1);
  const MicroBatch batch = loader.next();
  EXPECT_EQ(batch.tokens, (std::vector<int32_t>{1, 2, 3, 0, 0, 0, 0, 0, 1, 2, 3, 0, 0, 0, 0, 0}));
  EXPECT_EQ(batch.cu_seqlens, (std::vector<int32_t>{0, 3, 8, 11, 16}));
}

// What ranks get is what one rank gets, dealt in turn; from their common position any number goes
// on.
TEST_F(DataLoaderTest, RanksShareOneStream) {
  const std::string path = write_lengths(kLengths);
  constexpr int kMicroBatches = 60;  // of 2 rows: twelve epochs of 10
  DataLoader single(path, kBatch, 3, true);
  std::vector<MicroBatch> stream;
  for (int i = 0; i < kMicroBatches; ++i) stream.push_back(single.next());
  for (const int ranks : {1, 2, 3, 4, 12}) {
    for (int rank = 0; rank < ranks; ++rank) {
      DataLoader loader(path, kBatch, 3, true, {rank, ranks});
      DataLoader one(path, kBatch, 3, true);
      for (int i = 0; i + ranks <= kMicroBatches; i += ranks) {
        const MicroBatch batch = loader.next();
        EXPECT_EQ(batch.tokens, stream[static_cast<size_t>(i + rank)].tokens)
            << "rank " << rank << " of " << ranks << ", micro-batch " << i;
        EXPECT_EQ(batch.labels, stream[static_cast<size_t>(i + rank)].labels);
      }
      one.seek(loader.position());
      EXPECT_EQ(one.next().tokens, single_after(path, kMicroBatches / ranks * ranks).tokens);
    }
  }
  EXPECT_THROW(DataLoader(path, kBatch, 3, true, {2, 2}), Error);
}

}  // namespace
}  // namespace orlop::test
