#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

namespace orlop::nvme {

// One chunk of a shard: all its state planes side by side, at most one slot.
struct ChunkKey {
  int32_t shard = 0;
  int32_t chunk = 0;

  auto operator<=>(const ChunkKey&) const = default;
};

struct ChunkSpec {
  ChunkKey key;
  size_t bytes = 0;
};

// Where a chunk lives: one contiguous piece of one file, so it is one read and one write.
struct Extent {
  ChunkKey key;
  uint32_t file = 0;      // index of the directory
  uint64_t offset = 0;    // in the file; a multiple of the alignment
  uint64_t bytes = 0;     // of data
  uint64_t capacity = 0;  // bytes rounded up to the alignment; the rest holds zeros
};

// Places chunks on files. Neighbours in `chunks` land on different files, and every file gets bytes
// in proportion to its weight (its bandwidth), so all drives finish together.
class ExtentTable {
 public:
  // Extents of every file start at `first_offset` and follow each other without gaps. Throws
  // Error(kUsage) for a key that comes twice.
  ExtentTable(std::span<const ChunkSpec> chunks, std::span<const double> weights, size_t alignment,
              uint64_t first_offset);

  // More chunks behind those that are there, whose extents stay where they are. After an error the
  // table is of no use.
  void add(std::span<const ChunkSpec> chunks);

  std::span<const Extent> extents() const { return extents_; }
  // Position in extents(). Throws Error(kInternal) for an unknown chunk.
  size_t find(ChunkKey key) const;
  // Bytes that the extents of each file take, from first_offset on.
  std::span<const uint64_t> bytes_per_file() const { return bytes_per_file_; }

 private:
  std::vector<double> weights_;
  size_t alignment_;
  uint64_t first_offset_;
  std::vector<Extent> extents_;
  std::vector<uint64_t> bytes_per_file_;
  std::map<ChunkKey, size_t> index_;
};

}  // namespace orlop::nvme
