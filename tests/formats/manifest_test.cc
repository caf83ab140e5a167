#include "formats/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "formats/safetensors.h"
#include "formats/safetensors_writer.h"
#include "tests/formats/support.h"

namespace orlop {
namespace {

namespace fs = std::filesystem;
using test::error_of;
using test::pattern;
using test::slurp;
using test::spill;
using test::TempFolder;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr size_t kTensorBytes = 50'000;

// Saves one checkpoint whose content depends on the step.
fs::path save(const fs::path& root, int64_t step) {
  const fs::path folder = begin_checkpoint(root, step);
  Manifest manifest;
  manifest.step = step;
  manifest.state = {{"tokens", step * 100}, {"nested", {{"seed", 7}}}};
  for (const char* name : {"model/a.safetensors", "optim/rank-0.safetensors"}) {
    fs::create_directories((folder / name).parent_path());
    SafetensorsWriter writer(folder / name, {{"t", DType::kI8, {kTensorBytes}}});
    writer.write("t", 0, pattern(kTensorBytes, static_cast<size_t>(step)));
    const WrittenFile file = writer.finish();
    manifest.files.push_back({name, file.bytes, file.xxh3});
  }
  return commit_checkpoint(root, manifest);
}

std::vector<int64_t> steps(const fs::path& root) {
  std::vector<int64_t> steps;
  for (const CheckpointEntry& entry : list_checkpoints(root)) steps.push_back(entry.step);
  return steps;
}

void expect_whole(const fs::path& folder, int64_t step) {
  const Manifest manifest = read_checkpoint(folder, VerifyHashes::kYes);
  EXPECT_EQ(manifest.step, step);
  EXPECT_EQ(manifest.state["tokens"], step * 100);
  ASSERT_EQ(manifest.files.size(), 2u);
  const SafetensorsReader reader(folder / manifest.files[1].path);
  std::vector<std::byte> bytes(kTensorBytes);
  reader.read(reader.at("t"), 0, bytes);
  EXPECT_EQ(bytes, pattern(kTensorBytes, static_cast<size_t>(step)));
}

TEST(Manifest, ACommitIsReadBack) {
  const TempFolder folder;
  const fs::path root = folder / "runs/a";
  const fs::path saved = save(root, 12);
  EXPECT_EQ(saved, root / "step-12");
  expect_whole(saved, 12);
  EXPECT_FALSE(fs::exists(root / "step-12.tmp"));
}

TEST(Manifest, TheNewestIsTheOneWrittenLastAndWithoutASequenceTheLargestStep) {
  const TempFolder folder;
  EXPECT_THAT(list_checkpoints(folder / "absent"), IsEmpty());
  for (const int64_t step : {9, 100, 10}) save(folder.path(), step);
  fs::create_directory(folder / "step-x");
  fs::create_directory(folder / "step-");
  spill(folder / "step-5", "a file");
  EXPECT_THAT(steps(folder.path()), ElementsAre(10, 100, 9));
  for (const int64_t step : {9, 100, 10}) {
    const fs::path file = folder / fmt::format("step-{}", step) / kManifestName;
    nlohmann::json manifest = nlohmann::json::parse(slurp(file));
    manifest.erase("sequence");
    spill(file, manifest.dump());
  }
  EXPECT_THAT(steps(folder.path()), ElementsAre(100, 10, 9));
  save(folder.path(), 20);
  EXPECT_THAT(steps(folder.path()), ElementsAre(20, 100, 10, 9));
}

TEST(Manifest, PrunesTheOldest) {
  const TempFolder folder;
  for (const int64_t step : {1, 2, 3, 4}) save(folder.path(), step);
  prune_checkpoints(folder.path(), 9);
  EXPECT_THAT(steps(folder.path()), ElementsAre(4, 3, 2, 1));
  prune_checkpoints(folder.path(), 2);
  EXPECT_THAT(steps(folder.path()), ElementsAre(4, 3));
  EXPECT_THAT(folder.names(), ElementsAre("step-3", "step-4"));
}

TEST(Manifest, TheSameStepMayBeSavedAgain) {
  const TempFolder folder;
  save(folder.path(), 3);
  save(folder.path(), 3);
  EXPECT_EQ(read_checkpoint(folder / "step-3", VerifyHashes::kNo).sequence, 2);
  expect_whole(folder / "step-3", 3);
  EXPECT_THAT(folder.names(), ElementsAre("step-3"));
}

TEST(Manifest, LeftoversAreRemovedOrRestored) {
  const TempFolder folder;
  save(folder.path(), 1);
  save(folder.path(), 2);
  begin_checkpoint(folder.path(), 3);
  fs::rename(folder / "step-2", folder / "step-2.old");  // an end between two renames
  fs::copy(folder / "step-1", folder / "step-1.old", fs::copy_options::recursive);
  EXPECT_THAT(steps(folder.path()), ElementsAre(1));
  EXPECT_EQ(leftover_bytes(folder.path()), 0u);
  spill(folder / "step-3.tmp" / "half", std::string(100'000, 'x'));
  EXPECT_GE(leftover_bytes(folder.path()), 100000u);
  remove_leftovers(folder.path());
  EXPECT_EQ(leftover_bytes(folder.path()), 0u);
  EXPECT_THAT(folder.names(), ElementsAre("step-1", "step-2"));
  EXPECT_THAT(steps(folder.path()), ElementsAre(2, 1));
  remove_leftovers(folder / "absent");
}

TEST(Manifest, ADamagedCheckpointIsPassedOverAndNamed) {
  const TempFolder folder;
  for (const int64_t step : {1, 2, 3, 4, 5}) save(folder.path(), step);
  fs::remove(folder / "step-5/manifest.json");
  fs::remove(folder / "step-4/model/a.safetensors");
  fs::resize_file(folder / "step-3/model/a.safetensors", 100);
  EXPECT_THAT(steps(folder.path()), ElementsAre(2, 1));
  const auto text = [&](const std::string& name, VerifyHashes verify) {
    return error_of(ErrorCode::kInvalidData, [&] { read_checkpoint(folder / name, verify); });
  };
  EXPECT_THAT(text("step-5", VerifyHashes::kNo), HasSubstr("it has no manifest.json"));
  EXPECT_THAT(text("step-4", VerifyHashes::kNo), HasSubstr("a.safetensors' is missing"));
  EXPECT_THAT(text("step-3", VerifyHashes::kNo), HasSubstr("has 100 bytes"));

  // One flipped bit: only the hash can tell.
  const fs::path file = folder / "step-2/optim/rank-0.safetensors";
  std::string bytes = slurp(file);
  bytes[bytes.size() - 9] ^= 1;
  spill(file, bytes);
  read_checkpoint(folder / "step-2", VerifyHashes::kNo);
  EXPECT_THAT(text("step-2", VerifyHashes::kYes), HasSubstr("rank-0.safetensors' is damaged"));
}

TEST(Manifest, ACommitMustMatchTheFolder) {
  const TempFolder folder;
  save(folder.path(), 1);
  const fs::path made = begin_checkpoint(folder.path(), 2);
  spill(made / "a", "12345");
  const auto text = [&](std::vector<ManifestFile> files, ErrorCode code) {
    return error_of(code, [&] { commit_checkpoint(folder.path(), {2, {{"k", 1}}, files}); });
  };
  EXPECT_THAT(text({}, ErrorCode::kInternal), HasSubstr("a' is not in the manifest"));
  EXPECT_THAT(text({{"a", 4, 0}}, ErrorCode::kInternal), HasSubstr("has 5 bytes"));
  EXPECT_THAT(text({{"a", 5, 0}, {"b", 5, 0}}, ErrorCode::kIo), HasSubstr("b' for reading"));
  EXPECT_THAT(steps(folder.path()), ElementsAre(1));
}

// The text of version 1, as it must stay readable.
constexpr const char* kVersion1 = R"({
 "format": "orlop-checkpoint",
 "version": 1,
 "step": 40,
 "state": {"rng": [1, 2], "loader": {"position": 8}},
 "files": [
  {"path": "model/a.safetensors", "bytes": 9007199254740993, "xxh3": "00f00000000000ff"}
 ]
})";

TEST(Manifest, Version1StaysReadable) {
  const Manifest manifest = parse_manifest(kVersion1, "manifest.json");
  EXPECT_EQ(manifest.step, 40);
  EXPECT_EQ(manifest.sequence, 0);
  EXPECT_EQ(manifest.state["loader"]["position"], 8);
  ASSERT_EQ(manifest.files.size(), 1u);
  EXPECT_EQ(manifest.files[0].path, "model/a.safetensors");
  EXPECT_EQ(manifest.files[0].bytes, 9007199254740993u);
  EXPECT_EQ(manifest.files[0].xxh3, 0x00f00000000000ffu);
}

TEST(Manifest, EveryBadFieldIsNamed) {
  const auto refusal = [](const std::string& from, const std::string& to) {
    std::string text = kVersion1;
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
    return error_of(ErrorCode::kInvalidData, [&] { parse_manifest(text, "manifest.json"); });
  };
  EXPECT_THAT(refusal("orlop-checkpoint", "other"), HasSubstr("'format' is 'other'"));
  EXPECT_THAT(refusal("\"version\": 1", "\"version\": 2"),
              HasSubstr("has checkpoint version 2, this Orlop reads up to version 1"));
  EXPECT_THAT(refusal("\"step\": 40", "\"step\": -1"), HasSubstr("'step'"));
  EXPECT_THAT(refusal("\"step\": 40,", ""), HasSubstr("'step' is missing"));
  EXPECT_THAT(refusal("\"state\": {", "\"state\": 3, \"other\": {"),
              HasSubstr("'state' must be a JSON object, found 3"));
  EXPECT_THAT(refusal("model/a", "../a"), HasSubstr("'files[0].path' must be a path below"));
  EXPECT_THAT(refusal("model/a", "/a"), HasSubstr("'files[0].path'"));
  EXPECT_THAT(refusal("9007199254740993", "-1"), HasSubstr("'files[0].bytes'"));
  EXPECT_THAT(refusal("00f00000000000ff", "00f"), HasSubstr("'files[0].xxh3' must be 16 hex"));
  EXPECT_THAT(refusal("00f00000000000ff", "-0f00000000000ff"), HasSubstr("'files[0].xxh3'"));
  EXPECT_THAT(refusal("\"files\": [", "\"files\": [7,"), HasSubstr("'files[0]'"));
  EXPECT_THAT(refusal("]\n}", ""), HasSubstr("no valid JSON"));
}

// A child saves and prunes without end and is killed at a random moment; whatever it leaves, the
// newest complete checkpoint is whole and never older than the one before.
TEST(Manifest, SurvivesKillAtAnyMoment) {
  const TempFolder folder;
  save(folder.path(), 1);
  int64_t newest = 1;
  std::mt19937 random(20240607);
  std::uniform_int_distribution<int> delay_us(0, 40'000);
  for (int round = 0; round < 50; ++round) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      remove_leftovers(folder.path());
      for (int64_t step = newest;; ++step) {
        save(folder.path(), step);
        prune_checkpoints(folder.path(), 2);
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(delay_us(random)));
    ::kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the child ended by itself in round " << round;

    const auto complete = list_checkpoints(folder.path());
    ASSERT_FALSE(complete.empty()) << "round " << round;
    EXPECT_GE(complete[0].step, newest);
    for (const CheckpointEntry& entry : complete) expect_whole(entry.folder, entry.step);
    newest = complete[0].step;
  }
  RecordProperty("steps_saved", static_cast<int>(newest));
  remove_leftovers(folder.path());
  EXPECT_LE(folder.names().size(), 3u);
}

// Case C-20: a second process loads whatever it sees as soon as it appears (fsync and rename come
// first).
TEST(Manifest, AReaderNeverSeesHalfACheckpoint) {
  const TempFolder folder;
  constexpr int64_t kSaves = 100;
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    for (int64_t step = 1; step <= kSaves; ++step) save(folder.path(), step);
    std::_Exit(0);
  }
  for (int64_t step = 1; step <= kSaves; ++step) {
    const fs::path folder_of_step = folder / fmt::format("step-{}", step);
    while (!fs::exists(folder_of_step)) {
      const bool child_lives = ::waitpid(child, nullptr, WNOHANG) == 0;
      ASSERT_TRUE(child_lives || fs::exists(folder_of_step)) << "no step " << step;
      std::this_thread::yield();
    }
    expect_whole(folder_of_step, step);
  }
  ::waitpid(child, nullptr, 0);
}

}  // namespace
}  // namespace orlop
