#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/unique_fd.h"
#include "formats/safetensors_header.h"

namespace orlop {

inline constexpr const char* kSafetensorsFileName = "model.safetensors";
inline constexpr const char* kSafetensorsIndexName = "model.safetensors.index.json";

struct TensorInfo {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  size_t bytes = 0;
  size_t file_index = 0;   // into SafetensorsReader::files()
  size_t file_offset = 0;  // of the first byte

  int64_t numel() const { return shape_numel(shape); }
};

// The tensors of one safetensors file, or of a Hugging Face folder: model.safetensors, else the
// shards that model.safetensors.index.json names. All headers are read and checked at once; tensor
// bytes are read on demand, straight into the caller's memory. Reading is thread-safe.
class SafetensorsReader {
 public:
  // Throws Error(kInvalidData) with file, tensor and numbers for anything that does not fit
  // together, Error(kIo) when a file cannot be read.
  explicit SafetensorsReader(const std::filesystem::path& file_or_folder);

  // In the order of the files and of the bytes in them.
  std::span<const TensorInfo> tensors() const { return tensors_; }
  // Null when there is none of this name.
  const TensorInfo* find(std::string_view name) const;
  // Throws Error(kInvalidData) that names tensor and file.
  const TensorInfo& at(std::string_view name) const;

  // Fills `out` with the tensor's bytes from `byte_offset` on.
  void read(const TensorInfo& tensor, size_t byte_offset, std::span<std::byte> out) const;

  std::span<const std::filesystem::path> files() const { return paths_; }
  // Of the first file.
  const SafetensorsMetadata& metadata() const { return metadata_; }
  // Sum over all tensors.
  size_t data_bytes() const;

 private:
  void open_file(const std::filesystem::path& path);
  void open_shards(const std::filesystem::path& index_path);
  void add(TensorInfo tensor);

  std::filesystem::path source_;
  std::vector<std::filesystem::path> paths_;
  std::vector<UniqueFd> fds_;
  std::vector<TensorInfo> tensors_;
  std::unordered_map<std::string, size_t> by_name_;
  SafetensorsMetadata metadata_;
};

}  // namespace orlop
