#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace orlop {

// A checkpoint is the folder step-N with its files and, written last, manifest.json:
//   {"format": "orlop-checkpoint", "version": 1, "step": N, "sequence": M, "state": {...},
//    "files": [{"path": "model/a.safetensors", "bytes": 123, "xxh3": "0123456789abcdef"}, ...]}
// `sequence` counts the checkpoints written into one folder: the newest is the one that was written
// last, also when a run went back and its step is smaller; among those without it, which older
// versions wrote, the one with the largest step. No clock is asked.
// It is made under the name step-N.tmp and renamed when everything is on stable storage, so a
// folder with the name step-N is complete whenever the process or the machine ends.
inline constexpr int64_t kCheckpointVersion = 1;
inline constexpr const char* kManifestName = "manifest.json";

struct ManifestFile {
  std::string path;  // below the checkpoint's folder, with '/'
  size_t bytes = 0;
  uint64_t xxh3 = 0;  // XXH3-64 of the file
};

struct Manifest {
  int64_t step = 0;
  nlohmann::json state = nlohmann::json::object();  // the engine's own; always an object
  std::vector<ManifestFile> files;
  int64_t sequence = 0;  // from 1; 0: not stated
};

struct CheckpointEntry {
  int64_t sequence = 0;
  int64_t step = 0;
  std::filesystem::path folder;
};

enum class VerifyHashes : bool { kNo, kYes };

// root/step-N, whether it is there or not.
std::filesystem::path checkpoint_folder(const std::filesystem::path& root, int64_t step);

// root/step-N.tmp, which begin_checkpoint() makes.
std::filesystem::path unfinished_checkpoint(const std::filesystem::path& root, int64_t step);

// Makes `root` and an empty folder root/step-N.tmp, into which the checkpoint's files are then
// written, and returns it. What an interrupted save of the same step left there is removed.
std::filesystem::path begin_checkpoint(const std::filesystem::path& root, int64_t step);

// Ends begin_checkpoint(): checks that the folder holds the manifest's files with their sizes and
// no others, brings them to stable storage, writes the manifest and renames the folder to step-N,
// replacing an older checkpoint of that step. The manifest gets the next sequence number. Returns
// root/step-N. Throws Error(kIo), or Error(kInternal) when files and manifest differ; the
// checkpoints that exist stay as they are.
std::filesystem::path commit_checkpoint(const std::filesystem::path& root, Manifest manifest);

// The manifest of a checkpoint's folder. Checks that its files are there with their sizes, and with
// kYes their contents. Throws Error(kInvalidData) with file and numbers.
Manifest read_checkpoint(const std::filesystem::path& folder, VerifyHashes verify);

// The contents of one of its files; kYes does so for all. Throws Error(kInvalidData) with both
// hashes.
void verify_hash(const std::filesystem::path& folder, const ManifestFile& entry);

// The same from text alone, which is called `file` in errors; files are not looked at.
Manifest parse_manifest(std::string_view json, const std::string& file);

// Complete checkpoints (sizes checked) in `root`, newest first. Others are passed over with a
// warning. Empty when the folder does not exist.
std::vector<CheckpointEntry> list_checkpoints(const std::filesystem::path& root);

// Removes all complete checkpoints but the `keep` newest; `keep` is at least 1.
void prune_checkpoints(const std::filesystem::path& root, size_t keep);

// Removes what interrupted saves and removals left in `root`. Not while a save is running.
void remove_leftovers(const std::filesystem::path& root);

// Bytes that unfinished checkpoints take in `root`, which remove_leftovers() removes: what a save
// finds free beside the free bytes of the file system.
uint64_t leftover_bytes(const std::filesystem::path& root);

}  // namespace orlop
