#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "nvme/extent_table.h"
#include "nvme/process_identity.h"

namespace orlop::nvme {

// First block of every swap file, little-endian: who owns the file and where its parts lie.
//   [superblock, padded to the alignment][extents][table of records]
struct Superblock {
  enum State : uint32_t { kInUse = 1, kKept = 2 };

  char magic[8] = {};  // "ORLOPSWP"
  uint32_t format = 0;
  int32_t rank = 0;
  uint32_t state = 0;
  uint32_t checksum_kind = 0;  // 0 none, 1 sample, 2 full
  int64_t created = 0;         // seconds since 1970
  int64_t pid = 0;
  uint64_t start_ticks = 0;
  uint64_t pid_namespace = 0;
  char boot_id[40] = {};
  char host[64] = {};
  char run_id[64] = {};
  uint64_t file_bytes = 0;
  uint64_t extents_offset = 0;
  uint64_t table_offset = 0;
  uint64_t table_records = 0;
  uint64_t table_checksum = 0;  // XXH3 of the records; they are written when the file is kept
  uint64_t checksum = 0;        // XXH3 of all bytes before it
};
static_assert(std::is_trivially_copyable_v<Superblock> && sizeof(Superblock) == 272);

inline constexpr size_t kSuperblockBytes = 4096;  // read and written in one piece of this length

// What a kept file says about one chunk.
struct ChunkRecord {
  ChunkKey key;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  int64_t version = -1;  // step that wrote it; -1 when it was never written or a write failed
  uint64_t checksum = 0;

  bool operator==(const ChunkRecord&) const = default;
};
static_assert(std::is_trivially_copyable_v<ChunkRecord> && sizeof(ChunkRecord) == 40);

Superblock make_superblock(const ProcessIdentity& owner, int rank, const std::string& run_id);
// Sets the checksum.
void seal(Superblock& superblock);
// Owner and state are sound: magic, format and checksum.
bool is_sound(const Superblock& superblock);
ProcessIdentity owner_of(const Superblock& superblock);
std::string run_id_of(const Superblock& superblock);

uint64_t table_checksum(std::span<const ChunkRecord> records);

struct ShardFileInfo {
  Superblock superblock;
  std::vector<ChunkRecord> records;  // empty unless the file was kept
};

// Reads a swap file that no engine uses, as `orlop doctor` and the tests do. Throws
// Error(kInvalidData) for a file that is no swap file or whose table does not match its checksum.
ShardFileInfo inspect_shard_file(const std::string& path);

}  // namespace orlop::nvme
