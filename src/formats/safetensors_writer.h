#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/unique_fd.h"
#include "formats/safetensors_header.h"
#include "formats/xxh3_stream.h"

namespace orlop {

// A tensor that a file will hold.
struct TensorSpec {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
};

struct WrittenFile {
  std::filesystem::path path;
  size_t bytes = 0;
  uint64_t xxh3 = 0;  // XXH3-64 of the whole file
};

// Writes one safetensors file without ever holding it: the tensors are declared first, then their
// bytes come in pieces of any size and order. The data begins at a multiple of 4096 bytes, so that
// it can be read with direct I/O. Everything goes to `path`.tmp; nothing appears under `path`
// before it is complete and on stable storage, and the temporary file is removed when the writer
// ends without that.
//
// Tensors lie in the order of their declaration, those with wide elements first, without gaps. The
// hash runs along while writes come in the order of the file; the rest is read back once at the
// end. Used by one thread at a time.
class SafetensorsWriter {
 public:
  // Reserves the whole file. Throws Error(kIo) with the bytes wanted and free when the disk is
  // full.
  SafetensorsWriter(std::filesystem::path path, const std::vector<TensorSpec>& tensors,
                    SafetensorsMetadata metadata = {});
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  // Throws Error(kIo), or Error(kInternal) for an unknown tensor, bytes beyond its end or written
  // twice.
  void write(std::string_view tensor, size_t byte_offset, std::span<const std::byte> bytes);

  // seal() and publish().
  WrittenFile finish();

  // Checks that every byte was written and brings the file to stable storage under its temporary
  // name.
  WrittenFile seal();
  // Gives the sealed file its name.
  void publish();

  size_t file_bytes() const { return file_bytes_; }

 private:
  struct Extent {
    size_t begin = 0;  // in the file
    size_t bytes = 0;
  };

  void mark_written(size_t begin, size_t end, std::string_view tensor);
  void check_complete() const;

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  UniqueFd fd_;
  std::unordered_map<std::string, Extent> extents_;
  std::map<size_t, size_t> written_;  // disjoint ranges of the file: begin -> end
  size_t file_bytes_ = 0;
  Xxh3Stream hash_;
  size_t hashed_bytes_ = 0;
  bool sealed_ = false;
  bool published_ = false;
};

// Writes a Hugging Face folder's weights: model.safetensors when all tensors fit into
// `max_shard_bytes`, else shards model-00001-of-0000n.safetensors and their index. A tensor is
// never split. finish() gives all files their names, then removes weight files that an earlier
// export left under other names; until then the folder is as before. transformers asks for the
// metadata {"format": "pt"}.
class ShardedSafetensorsWriter {
 public:
  ShardedSafetensorsWriter(std::filesystem::path folder, const std::vector<TensorSpec>& tensors,
                           size_t max_shard_bytes, const SafetensorsMetadata& metadata);

  void write(std::string_view tensor, size_t byte_offset, std::span<const std::byte> bytes);

  // The weight files, in the order of the shards.
  std::vector<WrittenFile> finish();

 private:
  void write_index(const std::vector<WrittenFile>& files) const;
  void remove_stale(const std::vector<WrittenFile>& files) const;

  std::filesystem::path folder_;
  std::vector<std::unique_ptr<SafetensorsWriter>> shards_;
  std::unordered_map<std::string, size_t> shard_of_;
  size_t tensor_bytes_ = 0;
};

}  // namespace orlop
