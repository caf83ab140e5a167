#include "nvme/superblock.h"

#define XXH_INLINE_ALL
#include <fcntl.h>
#include <xxhash.h>

#include <array>
#include <bit>
#include <cstddef>
#include <cstring>
#include <ctime>
#include <string_view>

#include "base/check.h"
#include "base/unique_fd.h"
#include "nvme/direct_io.h"

namespace orlop::nvme {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::string_view kMagic = "ORLOPSWP";
constexpr uint32_t kFormat = 1;

template <size_t N>
void put(char (&field)[N], const std::string& text) {
  std::memcpy(field, text.data(), std::min(text.size(), N - 1));
}

template <size_t N>
std::string get(const char (&field)[N]) {
  return std::string(field, ::strnlen(field, N));
}

uint64_t own_checksum(const Superblock& superblock) {
  return XXH3_64bits(&superblock, offsetof(Superblock, checksum));
}

}  // namespace

Superblock make_superblock(const ProcessIdentity& owner, int rank, const std::string& run_id) {
  Superblock superblock;
  std::memcpy(superblock.magic, kMagic.data(), kMagic.size());
  superblock.format = kFormat;
  superblock.rank = rank;
  superblock.state = Superblock::kInUse;
  superblock.created = std::time(nullptr);
  superblock.pid = owner.pid;
  superblock.start_ticks = owner.start_ticks;
  superblock.pid_namespace = owner.pid_namespace;
  put(superblock.boot_id, owner.boot_id);
  put(superblock.host, owner.host);
  put(superblock.run_id, run_id);
  return superblock;
}

void seal(Superblock& superblock) { superblock.checksum = own_checksum(superblock); }

bool is_sound(const Superblock& superblock) {
  return std::string_view(superblock.magic, kMagic.size()) == kMagic &&
         superblock.format == kFormat && superblock.checksum == own_checksum(superblock);
}

ProcessIdentity owner_of(const Superblock& superblock) {
  return {superblock.pid, superblock.start_ticks, superblock.pid_namespace, get(superblock.boot_id),
          get(superblock.host)};
}

std::string run_id_of(const Superblock& superblock) { return get(superblock.run_id); }

uint64_t table_checksum(std::span<const ChunkRecord> records) {
  return XXH3_64bits(records.data(), records.size_bytes());
}

ShardFileInfo inspect_shard_file(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  check(static_cast<bool>(fd), ErrorCode::kIo, "cannot open {}: {}", path, errno_text(errno));
  ShardFileInfo info;
  read_fully(fd.get(), &info.superblock, sizeof info.superblock, 0, path);
  check(is_sound(info.superblock), ErrorCode::kInvalidData,
        "{} is not a swap file of this version, or its first block is damaged", path);
  if (info.superblock.state != Superblock::kKept) return info;
  const off_t end = ::lseek(fd.get(), 0, SEEK_END);
  const uint64_t table_bytes = info.superblock.table_records * sizeof(ChunkRecord);
  check(end >= 0 && info.superblock.table_offset <= static_cast<uint64_t>(end) &&
            table_bytes <= static_cast<uint64_t>(end) - info.superblock.table_offset,
        ErrorCode::kInvalidData, "{} has {} bytes; its table of {} chunks at {} lies beyond", path,
        end, info.superblock.table_records, info.superblock.table_offset);
  info.records.resize(info.superblock.table_records);
  read_fully(fd.get(), info.records.data(), table_bytes, info.superblock.table_offset, path);
  check(table_checksum(info.records) == info.superblock.table_checksum, ErrorCode::kInvalidData,
        "{}: the table of {} chunks at offset {} does not match its checksum", path,
        info.superblock.table_records, info.superblock.table_offset);
  return info;
}

}  // namespace orlop::nvme
