#include "formats/safetensors_writer.h"

#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "formats/file_io.h"
#include "formats/safetensors.h"

namespace orlop {
namespace {

namespace fs = std::filesystem;

constexpr size_t kDataAlignment = 4096;

size_t tensor_bytes(const TensorSpec& tensor) {
  const int64_t numel = shape_numel(tensor.shape);
  size_t bytes = 0;
  const bool fits = numel >= 0 && !__builtin_mul_overflow(static_cast<size_t>(numel),
                                                          dtype_bytes(tensor.dtype), &bytes);
  check(fits, ErrorCode::kInternal, "safetensors: tensor '{}' has the impossible shape {}",
        tensor.name, shape_text(tensor.shape));
  return bytes;
}

// Wide elements first, so that every tensor is aligned to its element when the data section is.
SafetensorsHeader lay_out(std::vector<TensorSpec> tensors, SafetensorsMetadata metadata) {
  std::stable_sort(tensors.begin(), tensors.end(), [](const TensorSpec& a, const TensorSpec& b) {
    return dtype_bytes(a.dtype) > dtype_bytes(b.dtype);
  });
  SafetensorsHeader header;
  header.metadata = std::move(metadata);
  size_t offset = 0;
  for (TensorSpec& tensor : tensors) {
    const size_t bytes = tensor_bytes(tensor);
    header.entries.push_back(
        {std::move(tensor.name), tensor.dtype, std::move(tensor.shape), offset, offset + bytes});
    offset += bytes;
  }
  return header;
}

std::string shard_name(size_t index, size_t count) {
  if (count == 1) return kSafetensorsFileName;
  return fmt::format("model-{:05}-of-{:05}.safetensors", index + 1, count);
}

// Consecutive tensors of at most `max_bytes` together; a larger tensor is alone.
std::vector<std::vector<TensorSpec>> split_into_shards(const std::vector<TensorSpec>& tensors,
                                                       size_t max_bytes) {
  std::vector<std::vector<TensorSpec>> shards(1);
  size_t used = 0;
  for (const TensorSpec& tensor : tensors) {
    const size_t bytes = tensor_bytes(tensor);
    if (!shards.back().empty() && (bytes > max_bytes || used > max_bytes - bytes)) {
      shards.emplace_back();
      used = 0;
    }
    shards.back().push_back(tensor);
    used += bytes;
  }
  return shards;
}

}  // namespace

SafetensorsWriter::SafetensorsWriter(fs::path path, const std::vector<TensorSpec>& tensors,
                                     SafetensorsMetadata metadata)
    : path_(std::move(path)), temporary_(path_.string() + ".tmp") {
  const SafetensorsHeader header = lay_out(tensors, std::move(metadata));
  const std::string head = make_safetensors_header(header, kDataAlignment);
  for (const SafetensorsEntry& entry : header.entries) {
    const Extent extent{head.size() + entry.begin, entry.end - entry.begin};
    check(entry.name != kSafetensorsMetadataKey && extents_.emplace(entry.name, extent).second,
          ErrorCode::kInternal, "'{}': tensor '{}' is declared twice or has a reserved name",
          path_.string(), entry.name);
  }
  file_bytes_ = head.size() + (header.entries.empty() ? 0 : header.entries.back().end);
  fd_ = open_for_writing(temporary_);
  try {
    reserve_space(fd_, temporary_, file_bytes_);
    write_at(fd_, temporary_, 0, std::as_bytes(std::span(head)));
  } catch (...) {
    ::unlink(temporary_.c_str());
    throw;
  }
  hash_.update(std::as_bytes(std::span(head)));
  hashed_bytes_ = head.size();
  written_[0] = head.size();
}

SafetensorsWriter::~SafetensorsWriter() {
  if (!published_) ::unlink(temporary_.c_str());
}

void SafetensorsWriter::write(std::string_view tensor, size_t byte_offset,
                              std::span<const std::byte> bytes) {
  const auto found = extents_.find(std::string(tensor));
  if (sealed_ || found == extents_.end()) {
    fail(ErrorCode::kInternal, "'{}': tensor '{}' {}", path_.string(), tensor,
         sealed_ ? "is written after the end" : "was not declared");
  }
  const Extent& extent = found->second;
  if (byte_offset > extent.bytes || bytes.size() > extent.bytes - byte_offset) {
    fail(ErrorCode::kInternal, "'{}': {} bytes at offset {} do not fit tensor '{}' of {} bytes",
         path_.string(), bytes.size(), byte_offset, tensor, extent.bytes);
  }
  if (bytes.empty()) return;
  const size_t begin = extent.begin + byte_offset;
  mark_written(begin, begin + bytes.size(), tensor);
  write_at(fd_, temporary_, begin, bytes);
  if (begin == hashed_bytes_) {
    hash_.update(bytes);
    hashed_bytes_ += bytes.size();
  }
}

void SafetensorsWriter::mark_written(size_t begin, size_t end, std::string_view tensor) {
  auto next = written_.upper_bound(begin);
  const auto previous = std::prev(next);  // the header's range stands at 0
  if (previous->second > begin || (next != written_.end() && next->first < end)) {
    fail(ErrorCode::kInternal, "'{}': bytes of tensor '{}' are written twice", path_.string(),
         tensor);
  }
  if (next != written_.end() && next->first == end) {
    end = next->second;
    written_.erase(next);
  }
  if (previous->second == begin) {
    previous->second = end;
  } else {
    written_[begin] = end;
  }
}

void SafetensorsWriter::check_complete() const {
  const size_t covered = written_.begin()->second;
  if (covered == file_bytes_) return;
  for (const auto& [name, extent] : extents_) {
    if (covered >= extent.begin && covered < extent.begin + extent.bytes) {
      fail(ErrorCode::kInternal, "'{}': tensor '{}' of {} bytes was not written from byte {} on",
           path_.string(), name, extent.bytes, covered - extent.begin);
    }
  }
}

WrittenFile SafetensorsWriter::finish() {
  WrittenFile file = seal();
  publish();
  return file;
}

WrittenFile SafetensorsWriter::seal() {
  ORLOP_INVARIANT(!sealed_);
  check_complete();
  sync_file(fd_, temporary_);
  update_xxh3(hash_, fd_, temporary_, hashed_bytes_, file_bytes_);
  sealed_ = true;
  return {path_, file_bytes_, hash_.digest()};
}

void SafetensorsWriter::publish() {
  ORLOP_INVARIANT(sealed_ && !published_);
  rename_durably(temporary_, path_);
  published_ = true;
}

ShardedSafetensorsWriter::ShardedSafetensorsWriter(fs::path folder,
                                                   const std::vector<TensorSpec>& tensors,
                                                   size_t max_shard_bytes,
                                                   const SafetensorsMetadata& metadata)
    : folder_(std::move(folder)) {
  const auto shards = split_into_shards(tensors, max_shard_bytes);
  for (size_t index = 0; index < shards.size(); ++index) {
    for (const TensorSpec& tensor : shards[index]) {
      check(shard_of_.emplace(tensor.name, index).second, ErrorCode::kInternal,
            "'{}': tensor '{}' is declared twice", folder_.string(), tensor.name);
      tensor_bytes_ += tensor_bytes(tensor);
    }
    shards_.push_back(std::make_unique<SafetensorsWriter>(
        folder_ / shard_name(index, shards.size()), shards[index], metadata));
  }
}

void ShardedSafetensorsWriter::write(std::string_view tensor, size_t byte_offset,
                                     std::span<const std::byte> bytes) {
  const auto shard = shard_of_.find(std::string(tensor));
  check(shard != shard_of_.end(), ErrorCode::kInternal, "'{}': tensor '{}' was not declared",
        folder_.string(), tensor);
  shards_[shard->second]->write(tensor, byte_offset, bytes);
}

std::vector<WrittenFile> ShardedSafetensorsWriter::finish() {
  std::vector<WrittenFile> files;
  for (const auto& shard : shards_) files.push_back(shard->seal());
  // An end between here and write_index() must not leave an old index over new shards.
  if (shards_.size() > 1) ::unlink((folder_ / kSafetensorsIndexName).c_str());
  for (const auto& shard : shards_) shard->publish();
  if (shards_.size() > 1) write_index(files);
  remove_stale(files);
  return files;
}

void ShardedSafetensorsWriter::write_index(const std::vector<WrittenFile>& files) const {
  nlohmann::json index;
  index["metadata"]["total_size"] = tensor_bytes_;
  for (const auto& [tensor, shard] : shard_of_) {
    index["weight_map"][tensor] = files[shard].path.filename().string();
  }
  write_text_file(folder_ / kSafetensorsIndexName, index.dump(2) + "\n");
}

void ShardedSafetensorsWriter::remove_stale(const std::vector<WrittenFile>& files) const {
  static const std::regex weight_file(R"(model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?)");
  std::set<std::string> fresh;
  for (const WrittenFile& file : files) fresh.insert(file.path.filename().string());
  if (files.size() > 1) fresh.insert(kSafetensorsIndexName);
  for (const fs::path& path : list_folder(folder_)) {
    const std::string name = path.filename().string();
    if (!std::regex_match(name, weight_file) || fresh.contains(name)) continue;
    std::error_code error;
    fs::remove(path, error);
    check(!error, ErrorCode::kIo, "cannot remove '{}' of an earlier export: {}", path.string(),
          error.message());
  }
  sync_folder(folder_);
}

}  // namespace orlop
