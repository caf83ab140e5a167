#include "nvme/extent_table.h"

#include "base/bytes.h"
#include "base/check.h"

namespace orlop::nvme {

ExtentTable::ExtentTable(std::span<const ChunkSpec> chunks, std::span<const double> weights,
                         size_t alignment, uint64_t first_offset)
    : weights_(weights.begin(), weights.end()),
      alignment_(alignment),
      first_offset_(first_offset),
      bytes_per_file_(weights.size(), 0) {
  ORLOP_INVARIANT(!weights.empty() && first_offset % alignment == 0);
  for (const double weight : weights) ORLOP_INVARIANT(weight > 0);
  add(chunks);
}

void ExtentTable::add(std::span<const ChunkSpec> chunks) {
  extents_.reserve(extents_.size() + chunks.size());
  for (const ChunkSpec& chunk : chunks) {
    const uint64_t capacity = align_up(chunk.bytes, alignment_);
    // The file that would be done first with this chunk added.
    uint32_t file = 0;
    double earliest = 0;
    for (uint32_t i = 0; i < weights_.size(); ++i) {
      const double end = static_cast<double>(bytes_per_file_[i] + capacity) / weights_[i];
      if (i == 0 || end < earliest) {
        file = i;
        earliest = end;
      }
    }
    const bool added = index_.emplace(chunk.key, extents_.size()).second;
    check(added, ErrorCode::kUsage, "shard {} chunk {} comes twice in the list of chunks",
          chunk.key.shard, chunk.key.chunk);
    extents_.push_back(
        {chunk.key, file, first_offset_ + bytes_per_file_[file], chunk.bytes, capacity});
    bytes_per_file_[file] += capacity;
  }
}

size_t ExtentTable::find(ChunkKey key) const {
  const auto found = index_.find(key);
  check(found != index_.end(), ErrorCode::kInternal, "shard {} chunk {} has no place on any drive",
        key.shard, key.chunk);
  return found->second;
}

}  // namespace orlop::nvme
