#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <string>
#include <vector>

#include "formats/safetensors.h"
#include "tests/formats/support.h"

namespace orlop {
namespace {

using test::error_of;
using test::slurp;
using test::spill;
using test::TempFolder;
using ::testing::HasSubstr;

// A file with this header and data.
std::string file_of(const std::string& json, size_t data_bytes) {
  const uint64_t length = json.size();
  std::string bytes(reinterpret_cast<const char*>(&length), sizeof(length));
  return bytes + json + std::string(data_bytes, 'x');
}

std::string entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
}

TEST(SafetensorsReader, ReadsWhatTheHeaderSays) {
  const TempFolder folder;
  std::string bytes = file_of(
      R"({"__metadata__":{"format":"pt"},"b":)" + entry("I8", "[3]", "[8,11]") + R"(,"a":)" +
          entry("F32", "[2,1]", "[0,8]") + R"(,"none":)" + entry("F16", "[0,7]", "[11,11]") +
          R"(,"scalar":)" + entry("BOOL", "[]", "[11,12]") + "}  ",
      12);
  for (size_t i = 0; i < 12; ++i) bytes[bytes.size() - 12 + i] = static_cast<char>(i);
  spill(folder / "x.safetensors", bytes);

  const SafetensorsReader reader(folder / "x.safetensors");
  ASSERT_EQ(reader.tensors().size(), 4u);
  EXPECT_EQ(reader.tensors()[0].name, "a");
  EXPECT_EQ(reader.metadata(), (SafetensorsMetadata{{"format", "pt"}}));
  EXPECT_EQ(reader.data_bytes(), 12u);
  const TensorInfo& a = reader.at("a");
  EXPECT_EQ(a.dtype, DType::kF32);
  EXPECT_EQ(a.shape, (std::vector<int64_t>{2, 1}));
  EXPECT_EQ(a.bytes, 8u);
  EXPECT_EQ(reader.at("none").numel(), 0);
  EXPECT_EQ(reader.at("scalar").numel(), 1);
  EXPECT_EQ(reader.find("c"), nullptr);
  EXPECT_THAT(error_of(ErrorCode::kInvalidData, [&] { reader.at("c"); }),
              HasSubstr("has no tensor 'c'"));

  std::vector<std::byte> out(2);
  reader.read(reader.at("b"), 1, out);
  EXPECT_EQ(out, (std::vector{std::byte{9}, std::byte{10}}));
  reader.read(reader.at("none"), 0, {});
  error_of(ErrorCode::kInternal, [&] { reader.read(reader.at("b"), 2, out); });
}

struct BadHeader {
  const char* name;
  std::string bytes;
  std::vector<std::string> text;  // what the message must say
};

// Case C-18: one_byte_too_many and the holes.
std::vector<BadHeader> bad_headers() {
  const auto one = [](const std::string& name, const std::string& value) {
    return R"({")" + name + R"(":)" + value + "}";
  };
  const std::string f32_2 = entry("F32", "[2]", "[0,8]");
  std::string huge_length = file_of("{}", 0);
  huge_length[7] = '\x7f';
  return {
      {"empty", "", {"has 0 bytes"}},
      {"seven_bytes", "1234567", {"has 7 bytes"}},
      {"length_beyond_the_limit", huge_length, {"at most 100000000 are allowed"}},
      {"length_beyond_the_file", file_of("{}", 0).substr(0, 9), {"claims 2 bytes", "only 1 "}},
      {"empty_header", file_of("", 4), {"does not begin with"}},
      {"no_json", file_of("{oops}", 0), {"no valid JSON at byte 2 of 6"}},
      {"json_then_rubbish", file_of("{}{}", 0), {"no valid JSON"}},
      {"invalid_utf8", file_of("{\"\xff\":1}", 0), {"no valid JSON"}},
      {"an_array", file_of("[]", 0), {"does not begin with"}},
      {"leading_space", file_of(" {}", 0), {"does not begin with"}},
      {"duplicate_name",
       file_of(R"({"a":)" + entry("F32", "[2]", "[0,8]") + R"(,"a":)" +
                   entry("F32", "[2]", "[8,16]") + "}",
               16),
       {"the key \"a\" stands twice"}},
      {"too_deep",
       file_of("{\"a\":" + std::string(100, '[') + std::string(100, ']') + "}", 0),
       {"more than 64 levels"}},
      {"entry_is_no_object", file_of(one("a", "7"), 0), {"'a' must be a JSON object, found 7"}},
      {"dtype_missing",
       file_of(one("a", R"({"shape":[2],"data_offsets":[0,8]})"), 8),
       {"'a.dtype' is missing"}},
      {"dtype_wrong_type",
       file_of(one("a", R"({"dtype":4,"shape":[2],"data_offsets":[0,8]})"), 8),
       {"'a.dtype' must be a string, found 4"}},
      {"dtype_unknown",
       file_of(one("a", entry("F8_E4M3", "[8]", "[0,8]")), 8),
       {"tensor 'a' has dtype 'F8_E4M3'"}},
      {"shape_missing",
       file_of(one("a", R"({"dtype":"F32","data_offsets":[0,8]})"), 8),
       {"'a.shape' is missing"}},
      {"shape_negative", file_of(one("a", entry("F32", "[-2]", "[0,8]")), 8), {"'a.shape'", "-2"}},
      {"shape_fraction", file_of(one("a", entry("F32", "[2.0]", "[0,8]")), 8), {"'a.shape'"}},
      {"shape_overflow",
       file_of(one("a", entry("F32", "[4294967296,4294967296,4]", "[0,8]")), 8),
       {"tensor 'a'", "exceed 64 bits"}},
      {"bytes_overflow",
       file_of(one("a", entry("F64", "[4611686018427387904]", "[0,0]")), 0),
       {"tensor 'a'", "exceed 64 bits"}},
      {"offsets_of_three",
       file_of(one("a", entry("F32", "[2]", "[0,8,9]")), 8),
       {"'a.data_offsets'"}},
      {"offsets_negative",
       file_of(one("a", entry("F32", "[2]", "[-8,0]")), 8),
       {"'a.data_offsets'"}},
      {"offsets_backwards", file_of(one("a", entry("F32", "[2]", "[8,0]")), 8), {"run backwards"}},
      {"shape_and_bytes_differ",
       file_of(one("a", entry("F32", "[3]", "[0,8]")), 8),
       {"tensor 'a' of F32 [3] takes 12 bytes", "[0, 8] span 8"}},
      {"truncated", file_of(one("a", f32_2), 7), {"tensor 'a' ends at data byte 8", "only 7"}},
      {"one_byte_too_many", file_of(one("a", f32_2), 9), {"end at data byte 8", "1 too many"}},
      {"no_tensors_but_data", file_of("{}", 3), {"3 too many"}},
      {"overlap",
       file_of(R"({"a":)" + f32_2 + R"(,"b":)" + entry("F32", "[2]", "[4,12]") + "}", 12),
       {"tensors 'a' and 'b' overlap", "begins at data byte 4", "ends at 8"}},
      {"same_bytes_twice", file_of(R"({"a":)" + f32_2 + R"(,"b":)" + f32_2 + "}", 8), {"overlap"}},
      {"hole",
       file_of(R"({"a":)" + f32_2 + R"(,"b":)" + entry("F32", "[1]", "[12,16]") + "}", 16),
       {"no tensor covers data bytes 8 to 12, before tensor 'b'"}},
      {"hole_at_the_start",
       file_of(one("a", entry("F32", "[1]", "[4,8]")), 8),
       {"data bytes 0 to 4"}},
      {"metadata_not_strings",
       file_of(R"({"__metadata__":{"n":1}})", 0),
       {"'__metadata__.n' must be a string, found 1"}},
      {"metadata_no_object", file_of(R"({"__metadata__":"x"})", 0), {"__metadata__"}},
  };
}

class BadHeaderTest : public ::testing::TestWithParam<BadHeader> {};

TEST_P(BadHeaderTest, IsOneClearError) {
  const TempFolder folder;
  const auto path = folder / "bad.safetensors";
  spill(path, GetParam().bytes);
  const std::string text = error_of(ErrorCode::kInvalidData, [&] { SafetensorsReader{path}; });
  EXPECT_THAT(text, HasSubstr(path.string()));
  for (const std::string& part : GetParam().text) EXPECT_THAT(text, HasSubstr(part));
  EXPECT_EQ(slurp(path), GetParam().bytes);
}

INSTANTIATE_TEST_SUITE_P(All, BadHeaderTest, ::testing::ValuesIn(bad_headers()),
                         [](const auto& info) { return std::string(info.param.name); });

// A folder of two shards and their index.
class ShardsTest : public ::testing::Test {
 protected:
  ShardsTest() {
    spill(folder_ / "s1.safetensors", file_of(R"({"a":)" + entry("I8", "[4]", "[0,4]") + "}", 4));
    spill(folder_ / "s2.safetensors", file_of(R"({"b":)" + entry("I8", "[5]", "[0,5]") + "}", 5));
    write_index(R"("a":"s1.safetensors","b":"s2.safetensors")");
  }
  void write_index(const std::string& map) {
    spill(folder_ / kSafetensorsIndexName,
          R"({"metadata":{"total_size":9},"weight_map":{)" + map + "}}");
  }
  std::string refusal() {
    return error_of(ErrorCode::kInvalidData, [&] { SafetensorsReader{folder_.path()}; });
  }
  TempFolder folder_;
};

TEST_F(ShardsTest, AreOneModel) {
  const SafetensorsReader reader(folder_.path());
  EXPECT_EQ(reader.files().size(), 2u);
  EXPECT_EQ(reader.at("b").bytes, 5u);
  EXPECT_EQ(reader.files()[reader.at("b").file_index].filename(), "s2.safetensors");
  std::vector<std::byte> out(5);
  reader.read(reader.at("b"), 0, out);
  EXPECT_EQ(out, std::vector(5, std::byte{'x'}));
}

TEST_F(ShardsTest, ASingleFileComesFirst) {
  spill(folder_ / kSafetensorsFileName, file_of(R"({"c":)" + entry("I8", "[1]", "[0,1]") + "}", 1));
  const SafetensorsReader reader(folder_.path());
  EXPECT_NE(reader.find("c"), nullptr);
  EXPECT_EQ(reader.find("a"), nullptr);
}

TEST_F(ShardsTest, MissingFile) {
  std::filesystem::remove(folder_ / "s2.safetensors");
  EXPECT_THAT(refusal(), HasSubstr("names the file 's2.safetensors', which is missing"));
}

TEST_F(ShardsTest, TensorInNoFile) {
  write_index(R"("a":"s1.safetensors","b":"s2.safetensors","z":"s1.safetensors")");
  EXPECT_THAT(refusal(), HasSubstr("tensor 'z' is in 's1.safetensors', but it is in none"));
}

TEST_F(ShardsTest, TensorInAnotherFile) {
  write_index(R"("a":"s2.safetensors","b":"s1.safetensors")");
  EXPECT_THAT(refusal(),
              HasSubstr("tensor 'a' is in 's2.safetensors', but it is in 's1.safetensors'"));
}

TEST_F(ShardsTest, TensorNotListed) {
  spill(folder_ / "s1.safetensors", file_of(R"({"a":)" + entry("I8", "[4]", "[0,4]") + R"(,"x":)" +
                                                entry("I8", "[1]", "[4,5]") + "}",
                                            5));
  EXPECT_THAT(refusal(), HasSubstr("holds tensor 'x'"));
}

TEST_F(ShardsTest, TensorInTwoFiles) {
  spill(folder_ / "s2.safetensors", slurp(folder_ / "s1.safetensors"));
  EXPECT_THAT(refusal(), HasSubstr("tensor 'a' is both in"));
}

TEST_F(ShardsTest, FileOutsideTheFolder) {
  write_index(R"("a":"../s1.safetensors")");
  EXPECT_THAT(refusal(), HasSubstr("'../s1.safetensors', which is no file name"));
}

TEST_F(ShardsTest, MalformedIndex) {
  spill(folder_ / kSafetensorsIndexName, "{}");
  EXPECT_THAT(refusal(), HasSubstr("'weight_map' is missing"));
  spill(folder_ / kSafetensorsIndexName, R"({"weight_map":{"a":1}})");
  EXPECT_THAT(refusal(), HasSubstr("'weight_map.a' must be a string, found 1"));
  spill(folder_ / kSafetensorsIndexName, R"({"weight_map":{}})");
  EXPECT_THAT(refusal(), HasSubstr("'weight_map' is empty"));
}

TEST(SafetensorsReader, AbsentAndUnreadableFiles) {
  const TempFolder folder;
  EXPECT_THAT(error_of(ErrorCode::kInvalidData, [&] { SafetensorsReader{folder.path()}; }),
              HasSubstr("holds neither model.safetensors nor"));
  EXPECT_THAT(error_of(ErrorCode::kIo, [&] { SafetensorsReader{folder / "absent"}; }),
              HasSubstr("No such file"));
  std::filesystem::create_directory(folder / "model.safetensors");
  error_of(ErrorCode::kInvalidData, [&] { SafetensorsReader{folder.path()}; });
  // Nobody waits for a writer of a pipe.
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_THAT(error_of(ErrorCode::kInvalidData, [&] { SafetensorsReader{folder / "pipe"}; }),
              HasSubstr("pipe' is not a regular file"));
}

TEST(SafetensorsReader, AFileThatShrinksAfterwardsIsAnError) {
  const TempFolder folder;
  const auto path = folder / "x.safetensors";
  spill(path, file_of(R"({"a":)" + entry("I8", "[9]", "[0,9]") + "}", 9));
  const SafetensorsReader reader(path);
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 4);
  std::vector<std::byte> out(9);
  EXPECT_THAT(error_of(ErrorCode::kInvalidData, [&] { reader.read(reader.at("a"), 0, out); }),
              HasSubstr("9 bytes at offset"));
}

}  // namespace
}  // namespace orlop
