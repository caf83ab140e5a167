#include "formats/safetensors.h"

#include <map>
#include <set>
#include <utility>

#include "base/check.h"
#include "formats/file_io.h"
#include "formats/json_input.h"

namespace orlop {
namespace {

namespace fs = std::filesystem;

bool is_present(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

constexpr size_t kMaxIndexBytes = kSafetensorsMaxHeaderBytes;

struct OpenedFile {
  UniqueFd fd;
  SafetensorsHeader header;
  size_t data_begin = 0;
};

OpenedFile open_safetensors(const fs::path& path) {
  OpenedFile file;
  file.fd = open_for_reading(path);
  const size_t bytes = file_bytes(file.fd, path);
  check(bytes >= kSafetensorsLengthBytes, ErrorCode::kInvalidData,
        "'{}' has {} bytes, a safetensors file has at least {}", path.string(), bytes,
        kSafetensorsLengthBytes);
  uint64_t length = 0;
  read_at(file.fd, path, 0, std::as_writable_bytes(std::span(&length, 1)));
  const size_t header_bytes = parse_safetensors_length(length, bytes, path.string());
  std::string json(header_bytes, '\0');
  read_at(file.fd, path, kSafetensorsLengthBytes, std::as_writable_bytes(std::span(json)));
  file.data_begin = kSafetensorsLengthBytes + header_bytes;
  file.header = parse_safetensors_header(json, bytes - file.data_begin, path.string());
  return file;
}

// Tensor name -> name of the shard, as the index says.
std::map<std::string, std::string> read_weight_map(const fs::path& index_path) {
  const std::string file = index_path.string();
  const nlohmann::json root = parse_json(read_text_file(index_path, kMaxIndexBytes), file);
  const JsonFields map = JsonFields(root, file).object("weight_map");
  std::map<std::string, std::string> shards;
  for (const auto& [tensor, value] : map.json().items()) {
    const std::string shard = map.string(tensor.c_str());
    check(!shard.empty() && shard != ".." && shard != "." && shard.find('/') == std::string::npos,
          ErrorCode::kInvalidData, "'{}': tensor '{}' is said to be in '{}', which is no file name",
          file, tensor, shard);
    shards[tensor] = shard;
  }
  check(!shards.empty(), ErrorCode::kInvalidData, "'{}': 'weight_map' is empty", file);
  return shards;
}

}  // namespace

SafetensorsReader::SafetensorsReader(const fs::path& file_or_folder) : source_(file_or_folder) {
  std::error_code error;
  if (!fs::is_directory(source_, error)) {
    open_file(source_);
    return;
  }
  if (const fs::path single = source_ / kSafetensorsFileName; is_present(single)) {
    open_file(single);
    return;
  }
  const fs::path index = source_ / kSafetensorsIndexName;
  check(is_present(index), ErrorCode::kInvalidData, "'{}' holds neither {} nor {}",
        source_.string(), kSafetensorsFileName, kSafetensorsIndexName);
  open_shards(index);
}

void SafetensorsReader::open_file(const fs::path& path) {
  OpenedFile file = open_safetensors(path);
  const size_t file_index = paths_.size();
  if (file_index == 0) metadata_ = std::move(file.header.metadata);
  paths_.push_back(path);
  fds_.push_back(std::move(file.fd));
  for (SafetensorsEntry& entry : file.header.entries) {
    add({std::move(entry.name), entry.dtype, std::move(entry.shape), entry.end - entry.begin,
         file_index, file.data_begin + entry.begin});
  }
}

void SafetensorsReader::open_shards(const fs::path& index_path) {
  const auto weight_map = read_weight_map(index_path);
  std::set<std::string> shards;
  for (const auto& [tensor, shard] : weight_map) shards.insert(shard);
  for (const std::string& shard : shards) {
    const fs::path path = source_ / shard;
    check(is_present(path), ErrorCode::kInvalidData, "'{}' names the file '{}', which is missing",
          index_path.string(), shard);
    open_file(path);
  }
  for (const auto& [tensor, shard] : weight_map) {
    const TensorInfo* found = find(tensor);
    check(found != nullptr && paths_[found->file_index].filename() == shard,
          ErrorCode::kInvalidData, "'{}' says that tensor '{}' is in '{}', but it is {}",
          index_path.string(), tensor, shard,
          found ? fmt::format("in '{}'", paths_[found->file_index].filename().string())
                : "in none of its files");
  }
  for (const TensorInfo& tensor : tensors_) {
    check(weight_map.contains(tensor.name), ErrorCode::kInvalidData,
          "'{}' holds tensor '{}', which '{}' does not list", paths_[tensor.file_index].string(),
          tensor.name, index_path.string());
  }
}

void SafetensorsReader::add(TensorInfo tensor) {
  const auto [known, added] = by_name_.emplace(tensor.name, tensors_.size());
  if (!added) {
    fail(ErrorCode::kInvalidData, "tensor '{}' is both in '{}' and in '{}'", tensor.name,
         paths_[tensors_[known->second].file_index].string(), paths_[tensor.file_index].string());
  }
  tensors_.push_back(std::move(tensor));
}

const TensorInfo* SafetensorsReader::find(std::string_view name) const {
  const auto found = by_name_.find(std::string(name));
  return found == by_name_.end() ? nullptr : &tensors_[found->second];
}

const TensorInfo& SafetensorsReader::at(std::string_view name) const {
  const TensorInfo* found = find(name);
  check(found != nullptr, ErrorCode::kInvalidData, "'{}' has no tensor '{}'", source_.string(),
        name);
  return *found;
}

void SafetensorsReader::read(const TensorInfo& tensor, size_t byte_offset,
                             std::span<std::byte> out) const {
  ORLOP_INVARIANT(byte_offset <= tensor.bytes && out.size() <= tensor.bytes - byte_offset);
  read_at(fds_[tensor.file_index], paths_[tensor.file_index], tensor.file_offset + byte_offset,
          out);
}

size_t SafetensorsReader::data_bytes() const {
  size_t bytes = 0;
  for (const TensorInfo& tensor : tensors_) bytes += tensor.bytes;
  return bytes;
}

}  // namespace orlop
