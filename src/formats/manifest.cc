#include "formats/manifest.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "base/log.h"
#include "formats/file_io.h"
#include "formats/json_input.h"
#include "formats/xxh3_stream.h"

namespace orlop {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxManifestBytes = 256 * kMiB;
constexpr const char* kFormatName = "orlop-checkpoint";
constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kUnfinished = ".tmp";
// An older checkpoint of the same step, while the new one takes its name.
constexpr std::string_view kReplaced = ".old";

fs::path step_folder(const fs::path& root, int64_t step, std::string_view suffix = "") {
  return root / fmt::format("{}{}{}", kPrefix, step, suffix);
}

// N of the name "step-N" + suffix.
std::optional<int64_t> step_of(const std::string& name, std::string_view suffix = "") {
  std::string_view text = name;
  if (!text.starts_with(kPrefix) || !text.ends_with(suffix)) return std::nullopt;
  text.remove_prefix(kPrefix.size());
  text.remove_suffix(std::min(suffix.size(), text.size()));
  int64_t step = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), step);
  if (error != std::errc() || end != text.data() + text.size() || step < 0) return std::nullopt;
  return step;
}

bool is_folder(const fs::path& path) {
  std::error_code error;
  return fs::is_directory(path, error);
}

// Names of the folders in `root`; none when it does not exist.
std::vector<std::string> folder_names(const fs::path& root) {
  std::vector<std::string> names;
  if (!is_folder(root)) return names;
  for (const fs::path& path : list_folder(root)) {
    if (is_folder(path)) names.push_back(path.filename().string());
  }
  return names;
}

void remove_tree(const fs::path& folder) {
  std::error_code error;
  fs::remove_all(folder, error);
  check(!error, ErrorCode::kIo, "cannot remove '{}': {}", folder.string(), error.message());
}

void make_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  check(!error, ErrorCode::kIo, "cannot make the folder '{}': {}", folder.string(),
        error.message());
}

bool is_safe_path(const std::string& path) {
  const fs::path relative(path);
  if (path.empty() || relative.is_absolute() || path.back() == '/') return false;
  return std::none_of(relative.begin(), relative.end(),
                      [](const fs::path& part) { return part == ".." || part == "."; });
}

uint64_t parse_hash(const JsonFields& fields) {
  const std::string text = fields.string("xxh3");
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  if (text.size() != 16 || error != std::errc() || end != text.data() + text.size()) {
    fields.refuse("xxh3", "16 hexadecimal digits");
  }
  return value;
}

std::string manifest_text(const Manifest& manifest) {
  nlohmann::ordered_json root;
  root["format"] = kFormatName;
  root["version"] = kCheckpointVersion;
  root["step"] = manifest.step;
  root["sequence"] = manifest.sequence;
  root["state"] = manifest.state;
  root["files"] = nlohmann::ordered_json::array();
  for (const ManifestFile& file : manifest.files) {
    root["files"].push_back(
        {{"path", file.path}, {"bytes", file.bytes}, {"xxh3", fmt::format("{:016x}", file.xxh3)}});
  }
  return root.dump(1) + "\n";
}

// Every file below `folder` must be in `listed`. Syncs the folders, the inner ones first.
void sync_folders(const fs::path& folder, const std::set<fs::path>& listed) {
  for (const fs::path& path : list_folder(folder)) {
    if (is_folder(path)) {
      sync_folders(path, listed);
    } else {
      check(listed.contains(path), ErrorCode::kInternal,
            "'{}' is not in the manifest to be written", path.string());
    }
  }
  sync_folder(folder);
}

// Brings the manifest's files, and the names of all folders, to stable storage.
void sync_files(const fs::path& folder, const Manifest& manifest) {
  std::set<fs::path> listed;
  for (const ManifestFile& entry : manifest.files) {
    const fs::path path = folder / entry.path;
    const UniqueFd fd = open_for_reading(path);
    const size_t bytes = file_bytes(fd, path);
    check(bytes == entry.bytes, ErrorCode::kInternal,
          "'{}' has {} bytes, the manifest to be written says {}", path.string(), bytes,
          entry.bytes);
    sync_file(fd, path);
    listed.insert(path);
  }
  sync_folders(folder, listed);
}

// Gives `made` the name `target`, where another checkpoint of that step may stand.
void take_name(const fs::path& root, int64_t step, const fs::path& made, const fs::path& target) {
  std::error_code error;
  if (!fs::exists(target, error)) {
    rename_durably(made, target);
    return;
  }
  if (::renameat2(AT_FDCWD, made.c_str(), AT_FDCWD, target.c_str(), RENAME_EXCHANGE) == 0) {
    sync_folder(root);
    remove_tree(made);
    return;
  }
  // File systems that cannot exchange two names: an end between the two renames is put right by
  // remove_leftovers().
  const fs::path replaced = step_folder(root, step, kReplaced);
  rename_durably(target, replaced);
  rename_durably(made, target);
  remove_tree(replaced);
}

}  // namespace

fs::path unfinished_checkpoint(const fs::path& root, int64_t step) {
  return step_folder(root, step, kUnfinished);
}

fs::path checkpoint_folder(const fs::path& root, int64_t step) { return step_folder(root, step); }

fs::path begin_checkpoint(const fs::path& root, int64_t step) {
  const fs::path folder = step_folder(root, step, kUnfinished);
  make_folder(root);
  remove_tree(folder);
  make_folder(folder);
  return folder;
}

fs::path commit_checkpoint(const fs::path& root, Manifest manifest) {
  ORLOP_INVARIANT(manifest.state.is_object());
  const std::vector<CheckpointEntry> complete = list_checkpoints(root);
  manifest.sequence = complete.empty() ? 1 : complete.front().sequence + 1;
  const fs::path made = step_folder(root, manifest.step, kUnfinished);
  const fs::path target = step_folder(root, manifest.step);
  sync_files(made, manifest);
  write_text_file(made / kManifestName, manifest_text(manifest));
  sync_folder(made);
  take_name(root, manifest.step, made, target);
  return target;
}

Manifest parse_manifest(std::string_view json, const std::string& file) {
  const nlohmann::json root = parse_json(json, file);
  const JsonFields fields(root, file);
  const std::string format = fields.string("format");
  check(format == kFormatName, ErrorCode::kInvalidData, "'{}': 'format' is '{}', must be '{}'",
        file, format, kFormatName);
  const int64_t version = fields.integer("version", 1);
  check(version <= kCheckpointVersion, ErrorCode::kInvalidData,
        "'{}' has checkpoint version {}, this Orlop reads up to version {}: use a newer Orlop",
        file, version, kCheckpointVersion);
  Manifest manifest;
  manifest.step = fields.integer("step", 0);
  if (root.contains("sequence")) manifest.sequence = fields.integer("sequence", 0);
  manifest.state = fields.object("state").json();
  std::set<std::string> paths;
  for (const nlohmann::json& entry : fields.array("files")) {
    const JsonFields item(entry, file, fmt::format("files[{}].", manifest.files.size()));
    ManifestFile listed;
    listed.path = item.string("path");
    if (!is_safe_path(listed.path)) item.refuse("path", "a path below the checkpoint's folder");
    if (!paths.insert(listed.path).second) item.refuse("path", "a path that stands only once");
    listed.bytes = static_cast<size_t>(item.integer("bytes", 0));
    listed.xxh3 = parse_hash(item);
    manifest.files.push_back(std::move(listed));
  }
  return manifest;
}

Manifest read_checkpoint(const fs::path& folder, VerifyHashes verify) {
  const fs::path path = folder / kManifestName;
  std::error_code error;
  check(fs::exists(path, error), ErrorCode::kInvalidData,
        "'{}' is no complete checkpoint: it has no {}", folder.string(), kManifestName);
  Manifest manifest = parse_manifest(read_text_file(path, kMaxManifestBytes), path.string());
  for (const ManifestFile& entry : manifest.files) {
    const fs::path file = folder / entry.path;
    check(fs::exists(file, error), ErrorCode::kInvalidData, "'{}' is missing; '{}' lists it",
          file.string(), path.string());
    const UniqueFd fd = open_for_reading(file);
    const size_t bytes = file_bytes(fd, file);
    check(bytes == entry.bytes, ErrorCode::kInvalidData, "'{}' has {} bytes, '{}' says {}",
          file.string(), bytes, path.string(), entry.bytes);
    if (verify == VerifyHashes::kYes) verify_hash(folder, entry);
  }
  return manifest;
}

void verify_hash(const fs::path& folder, const ManifestFile& entry) {
  const fs::path file = folder / entry.path;
  const UniqueFd fd = open_for_reading(file);
  Xxh3Stream hash;
  update_xxh3(hash, fd, file, 0, file_bytes(fd, file));
  check(hash.digest() == entry.xxh3, ErrorCode::kInvalidData,
        "'{}' is damaged: its XXH3 is {:016x}, '{}' says {:016x}", file.string(), hash.digest(),
        (folder / kManifestName).string(), entry.xxh3);
}

std::vector<CheckpointEntry> list_checkpoints(const fs::path& root) {
  std::vector<CheckpointEntry> entries;
  for (const std::string& name : folder_names(root)) {
    const auto step = step_of(name);
    if (!step) continue;
    try {
      const Manifest manifest = read_checkpoint(root / name, VerifyHashes::kNo);
      check(manifest.step == *step, ErrorCode::kInvalidData, "'{}' holds the manifest of step {}",
            (root / name).string(), manifest.step);
      entries.push_back({manifest.sequence, *step, root / name});
    } catch (const Error& error) {
      log_warning("checkpoint passed over: {}", error.what());
    }
  }
  std::sort(entries.begin(), entries.end(), [](const CheckpointEntry& a, const CheckpointEntry& b) {
    return std::tie(a.sequence, a.step) > std::tie(b.sequence, b.step);
  });
  return entries;
}

void prune_checkpoints(const fs::path& root, size_t keep) {
  ORLOP_INVARIANT(keep >= 1);
  const std::vector<CheckpointEntry> entries = list_checkpoints(root);
  for (size_t i = keep; i < entries.size(); ++i) {
    // Renamed first: what is half removed must not look complete.
    const fs::path condemned = step_folder(root, entries[i].step, kUnfinished);
    remove_tree(condemned);
    rename_durably(entries[i].folder, condemned);
    remove_tree(condemned);
  }
}

void remove_leftovers(const fs::path& root) {
  for (const std::string& name : folder_names(root)) {
    if (const auto step = step_of(name, kReplaced)) {
      const fs::path target = step_folder(root, *step);
      std::error_code error;
      if (fs::exists(target, error)) {
        remove_tree(root / name);
      } else {
        rename_durably(root / name, target);
      }
    }
    if (step_of(name, kUnfinished)) remove_tree(root / name);
  }
}

uint64_t leftover_bytes(const fs::path& root) {
  uint64_t bytes = 0;
  for (const std::string& name : folder_names(root)) {
    if (!step_of(name, kUnfinished)) continue;
    std::error_code error;
    for (fs::recursive_directory_iterator it(root / name, error), end; !error && it != end;
         it.increment(error)) {
      struct stat file {};
      if (::lstat(it->path().c_str(), &file) == 0)
        bytes += static_cast<uint64_t>(file.st_blocks) * 512;
    }
  }
  return bytes;
}

}  // namespace orlop
