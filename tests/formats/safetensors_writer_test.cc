#include "formats/safetensors_writer.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "formats/file_io.h"
#include "formats/safetensors.h"
#include "tests/formats/support.h"

namespace orlop {
namespace {

using test::error_of;
using test::pattern;
using test::slurp;
using test::spill;
using test::TempFolder;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

uint64_t xxh3_of(const std::string& bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

std::vector<std::byte> read_whole(const SafetensorsReader& reader, const std::string& name) {
  const TensorInfo& tensor = reader.at(name);
  std::vector<std::byte> bytes(tensor.bytes);
  reader.read(tensor, 0, bytes);
  return bytes;
}

const std::vector<TensorSpec> kSpecs{
    {"mask", DType::kBool, {3}}, {"w", DType::kF32, {5, 2}}, {"e", DType::kF16, {0, 4}},
    {"s", DType::kI64, {}},      {"h", DType::kBF16, {7}},
};

void write_all(SafetensorsWriter& writer, const std::vector<TensorSpec>& specs) {
  for (const TensorSpec& spec : specs) {
    const size_t bytes = static_cast<size_t>(shape_numel(spec.shape)) * dtype_bytes(spec.dtype);
    writer.write(spec.name, 0, pattern(bytes, bytes));
  }
}

TEST(SafetensorsWriter, WritesWhatTheReaderReads) {
  const TempFolder folder;
  SafetensorsWriter writer(folder / "x.safetensors", kSpecs, {{"format", "pt"}, {"k", "v\"\n"}});
  write_all(writer, kSpecs);
  EXPECT_THAT(folder.names(), ElementsAre("x.safetensors.tmp"));
  const WrittenFile file = writer.finish();
  EXPECT_THAT(folder.names(), ElementsAre("x.safetensors"));

  const std::string bytes = slurp(file.path);
  EXPECT_EQ(file.bytes, bytes.size());
  EXPECT_EQ(file.xxh3, xxh3_of(bytes));
  const SafetensorsReader reader(file.path);
  EXPECT_EQ(reader.metadata(), (SafetensorsMetadata{{"format", "pt"}, {"k", "v\"\n"}}));
  ASSERT_EQ(reader.tensors().size(), kSpecs.size());
  EXPECT_EQ(reader.tensors()[0].file_offset % 4096, 0u);
  for (const TensorSpec& spec : kSpecs) {
    const TensorInfo& tensor = reader.at(spec.name);
    EXPECT_EQ(tensor.dtype, spec.dtype);
    EXPECT_EQ(tensor.shape, spec.shape);
    EXPECT_EQ(tensor.file_offset % dtype_bytes(tensor.dtype), 0u) << spec.name;
    EXPECT_EQ(read_whole(reader, spec.name), pattern(tensor.bytes, tensor.bytes));
  }
}

// Any tensors, cut into pieces that come in any order: the file holds exactly them, and its hash is
// that of its bytes.
RC_GTEST_PROP(SafetensorsWriterProperty, RoundTrip, ()) {
  const TempFolder folder;
  const auto dtypes = rc::gen::element(DType::kF64, DType::kF32, DType::kBF16, DType::kI8);
  const auto names = *rc::gen::unique<std::vector<std::string>>(
      rc::gen::nonEmpty(rc::gen::container<std::string>(rc::gen::inRange(char{1}, char{127}))));
  std::vector<TensorSpec> specs;
  std::map<std::string, std::vector<std::byte>> contents;
  struct Piece {
    std::string name;
    size_t begin;
    size_t end;
  };
  std::vector<Piece> pieces;
  for (const std::string& name : names) {
    const auto rank = *rc::gen::inRange<size_t>(0, 4);
    const auto shape =
        *rc::gen::container<std::vector<int64_t>>(rank, rc::gen::inRange<int64_t>(0, 9));
    specs.push_back({name, *dtypes, shape});
    const size_t bytes = static_cast<size_t>(shape_numel(shape)) * dtype_bytes(specs.back().dtype);
    contents[name] = pattern(bytes, bytes + name.size());
    for (size_t begin = 0; begin < bytes;) {
      const size_t end = std::min(bytes, begin + *rc::gen::inRange<size_t>(1, 600));
      pieces.push_back({name, begin, end});
      begin = end;
    }
  }
  std::shuffle(pieces.begin(), pieces.end(), std::mt19937(*rc::gen::arbitrary<uint32_t>()));

  SafetensorsWriter writer(folder / "x.safetensors", specs);
  for (const auto& [name, begin, end] : pieces) {
    writer.write(name, begin, std::span(contents[name]).subspan(begin, end - begin));
  }
  const WrittenFile file = writer.finish();
  RC_ASSERT(file.xxh3 == xxh3_of(slurp(file.path)));
  const SafetensorsReader reader(file.path);
  RC_ASSERT(reader.tensors().size() == specs.size());
  for (const TensorSpec& spec : specs) {
    RC_ASSERT(reader.at(spec.name).dtype == spec.dtype);
    RC_ASSERT(reader.at(spec.name).shape == spec.shape);
    RC_ASSERT(read_whole(reader, spec.name) == contents[spec.name]);
  }
}

TEST(SafetensorsWriter, WhatIsNotWrittenIsNamed) {
  const TempFolder folder;
  {
    SafetensorsWriter writer(folder / "x", {{"a", DType::kI8, {4}}, {"b", DType::kI8, {4}}});
    writer.write("a", 0, pattern(4));
    writer.write("b", 0, pattern(1));
    writer.write("b", 2, pattern(2));
    EXPECT_THAT(error_of(ErrorCode::kInternal, [&] { writer.finish(); }),
                HasSubstr("tensor 'b' of 4 bytes was not written from byte 1 on"));
  }
  EXPECT_THAT(folder.names(), IsEmpty()) << "nothing half written may stay";
}

TEST(SafetensorsWriter, MisuseIsRefused) {
  const TempFolder folder;
  const std::vector<TensorSpec> specs{{"a", DType::kI8, {4}}};
  SafetensorsWriter writer(folder / "x", specs);
  writer.write("a", 1, pattern(2));
  const auto text = [&](auto&& action) { return error_of(ErrorCode::kInternal, action); };
  EXPECT_THAT(text([&] { writer.write("z", 0, pattern(1)); }), HasSubstr("was not declared"));
  EXPECT_THAT(text([&] { writer.write("a", 3, pattern(2)); }), HasSubstr("do not fit"));
  EXPECT_THAT(text([&] { writer.write("a", SIZE_MAX, pattern(2)); }), HasSubstr("do not fit"));
  EXPECT_THAT(text([&] { writer.write("a", 0, pattern(2)); }), HasSubstr("written twice"));
  EXPECT_THAT(text([&] { writer.write("a", 2, pattern(2)); }), HasSubstr("written twice"));
  writer.write("a", 0, pattern(1));
  writer.write("a", 3, pattern(1));
  writer.finish();
  EXPECT_THAT(text([&] { writer.write("a", 0, pattern(1)); }), HasSubstr("after the end"));
  text([&] { SafetensorsWriter(folder / "y", {specs[0], specs[0]}); });
  text([&] { SafetensorsWriter(folder / "y", {{"__metadata__", DType::kI8, {4}}}); });
  text([&] { SafetensorsWriter(folder / "y", {{"a", DType::kI8, {-1}}}); });
  EXPECT_THAT(folder.names(), ElementsAre("x"));
}

TEST(SafetensorsWriter, AnOldFileStaysUntilTheNewOneIsComplete) {
  const TempFolder folder;
  spill(folder / "x", "old");
  const std::vector<TensorSpec> specs{{"a", DType::kI8, {4}}};
  { SafetensorsWriter writer(folder / "x", specs); }
  EXPECT_EQ(slurp(folder / "x"), "old");
  SafetensorsWriter writer(folder / "x", specs);
  writer.write("a", 0, pattern(4));
  EXPECT_EQ(slurp(folder / "x"), "old");
  writer.finish();
  EXPECT_EQ(read_whole(SafetensorsReader(folder / "x"), "a"), pattern(4));
}

TEST(SafetensorsWriter, AFolderThatIsAbsentIsNamed) {
  const TempFolder folder;
  EXPECT_THAT(error_of(ErrorCode::kIo,
                       [&] {
                         SafetensorsWriter(folder / "no/x", {{"a", DType::kI8, {4}}});
                       }),
              HasSubstr("no/x.tmp"));
}

// Ends the process with 0 when a file beyond the allowed size is refused and leaves nothing behind.
[[noreturn]] void exit_after_too_large_file(const TempFolder& folder) {
  ::signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  limit.rlim_cur = limit.rlim_max = 64 * kKiB;
  ::setrlimit(RLIMIT_FSIZE, &limit);
  try {
    SafetensorsWriter writer(folder / "x", {{"a", DType::kI8, {200'000}}});
    writer.write("a", 0, pattern(200'000));
    writer.finish();
  } catch (const Error& error) {
    std::fputs(error.what(), stderr);
    std::_Exit(error.code() == ErrorCode::kIo && folder.names().empty() ? 0 : 2);
  }
  std::_Exit(1);
}

TEST(SafetensorsWriterDeathTest, NoRoomForTheFileIsOneError) {
  const TempFolder folder;
  EXPECT_EXIT(exit_after_too_large_file(folder), ::testing::ExitedWithCode(0),
              "204096 bytes.* bytes. free");
}

TEST(FileIo, AFullDiskIsNamedWithItsNumbers) {
  const UniqueFd full(::open("/dev/full", O_WRONLY | O_CLOEXEC));
  if (!full) GTEST_SKIP() << "no /dev/full";
  const std::string text =
      error_of(ErrorCode::kIo, [&] { write_at(full, "/dev/full", 7, pattern(1000)); });
  EXPECT_THAT(text, HasSubstr("No space left on device"));
  EXPECT_THAT(text, HasSubstr("(1000 bytes) at offset 7 of '/dev/full'"));
  EXPECT_THAT(text, HasSubstr("free"));
}

// More than one system call moves. The target is the same piece of memory mapped over and over, so
// that 2 GiB need no memory: the last piece stays visible.
TEST(FileIo, AReadBeyondOneCallIsContinued) {
  constexpr size_t kPiece = 16 * kMiB;
  constexpr size_t kPieces = 129;
  constexpr size_t kBytes = kPieces * kPiece;
  static_assert(kBytes > 2 * kGiB);
  const char* const path = "sparse";
  const UniqueFd fd(::memfd_create(path, MFD_CLOEXEC));
  const auto last = pattern(kPiece);
  write_at(fd, path, kBytes - kPiece, last);

  const UniqueFd memory(::memfd_create("piece", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(memory.get(), kPiece), 0);
  void* const base =
      ::mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(base, MAP_FAILED);
  auto* const bytes = static_cast<std::byte*>(base);
  for (size_t i = 0; i < kPieces; ++i) {
    ASSERT_NE(::mmap(bytes + i * kPiece, kPiece, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                     memory.get(), 0),
              MAP_FAILED);
  }
  read_at(fd, path, 0, {bytes, kBytes});
  EXPECT_TRUE(std::equal(last.begin(), last.end(), bytes + kBytes - kPiece));
  ::munmap(base, kBytes);
}

TEST(FileIo, TextFilesAreReplacedWhole) {
  const TempFolder folder;
  write_text_file(folder / "t", "one");
  write_text_file(folder / "t", "two");
  EXPECT_EQ(read_text_file(folder / "t", 3), "two");
  EXPECT_THAT(error_of(ErrorCode::kInvalidData, [&] { read_text_file(folder / "t", 2); }),
              HasSubstr("has 3 bytes, at most 2"));
  EXPECT_THAT(folder.names(), ElementsAre("t"));
}

class ShardedWriterTest : public ::testing::Test {
 protected:
  // Tensors "t0", "t1", ... of the given bytes.
  std::vector<WrittenFile> write(const std::vector<int64_t>& sizes, size_t max_shard_bytes) {
    std::vector<TensorSpec> specs;
    for (size_t i = 0; i < sizes.size(); ++i) {
      specs.push_back({fmt::format("t{}", i), DType::kI8, {sizes[i]}});
    }
    ShardedSafetensorsWriter writer(folder_.path(), specs, max_shard_bytes, {{"format", "pt"}});
    for (size_t i = sizes.size(); i-- > 0;) {
      writer.write(specs[i].name, 0, pattern(static_cast<size_t>(sizes[i]), i));
    }
    return writer.finish();
  }
  void expect_readable(const std::vector<int64_t>& sizes) {
    const SafetensorsReader reader(folder_.path());
    ASSERT_EQ(reader.tensors().size(), sizes.size());
    for (size_t i = 0; i < sizes.size(); ++i) {
      EXPECT_EQ(read_whole(reader, fmt::format("t{}", i)),
                pattern(static_cast<size_t>(sizes[i]), i));
    }
  }
  TempFolder folder_;
};

TEST_F(ShardedWriterTest, WhatFitsIsOneFile) {
  EXPECT_EQ(write({10, 20, 30}, 60).size(), 1u);
  EXPECT_THAT(folder_.names(), ElementsAre("model.safetensors"));
  expect_readable({10, 20, 30});
}

TEST_F(ShardedWriterTest, SplitsInOrderAndWritesTheIndex) {
  const auto files = write({10, 20, 31, 100, 1}, 60);
  EXPECT_THAT(folder_.names(),
              ElementsAre("model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors",
                          "model-00003-of-00004.safetensors", "model-00004-of-00004.safetensors",
                          "model.safetensors.index.json"));
  const auto index = nlohmann::json::parse(slurp(folder_ / kSafetensorsIndexName));
  EXPECT_EQ(index["metadata"]["total_size"], 162);
  EXPECT_EQ(index["weight_map"]["t1"], "model-00001-of-00004.safetensors");
  EXPECT_EQ(index["weight_map"]["t2"], "model-00002-of-00004.safetensors");
  EXPECT_EQ(index["weight_map"]["t3"], "model-00003-of-00004.safetensors");
  EXPECT_EQ(files[3].xxh3, xxh3_of(slurp(files[3].path)));
  expect_readable({10, 20, 31, 100, 1});
}

TEST_F(ShardedWriterTest, AnExportReplacesTheOneBefore) {
  spill(folder_ / "config.json", "{}");
  spill(folder_ / "model-of-mine.safetensors", "kept");
  write({10, 20, 30}, 20);
  expect_readable({10, 20, 30});
  write({30, 40}, 40);
  expect_readable({30, 40});
  write({5}, 40);
  EXPECT_THAT(folder_.names(),
              ElementsAre("config.json", "model-of-mine.safetensors", "model.safetensors"));
  expect_readable({5});
  write({30, 40}, 40);
  EXPECT_THAT(folder_.names(),
              ElementsAre("config.json", "model-00001-of-00002.safetensors",
                          "model-00002-of-00002.safetensors", "model-of-mine.safetensors",
                          "model.safetensors.index.json"));
  expect_readable({30, 40});
}

TEST_F(ShardedWriterTest, AnUnfinishedExportChangesNothing) {
  write({10, 20, 30}, 20);
  {
    ShardedSafetensorsWriter writer(folder_.path(), {{"n", DType::kI8, {9}}}, 100, {});
    error_of(ErrorCode::kInternal, [&] { writer.write("m", 0, pattern(1)); });
    error_of(ErrorCode::kInternal, [&] { writer.finish(); });
  }
  expect_readable({10, 20, 30});
  EXPECT_EQ(folder_.names().size(), 4u);
}

}  // namespace
}  // namespace orlop
