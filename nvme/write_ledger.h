#pragma once

#include <cstdint>
#include <filesystem>

namespace orlop::nvme {

// Counts bytes written since midnight UTC, over all runs that use the same directory, so that a
// limit per day holds when a run is started again. Not thread-safe.
class WriteLedger {
 public:
  // Keeps the count in memory only.
  WriteLedger() = default;
  // Keeps it in "orlop-r<rank>.writes". Takes over what that file says about today, and what the
  // files of ranks that a run of `world_size` does not have say, which are removed; a file that is
  // missing or unreadable counts as nothing.
  WriteLedger(const std::filesystem::path& directory, int rank, int world_size);

  void add(uint64_t bytes);
  uint64_t bytes_today() const;
  // Writes the file. Never throws: a ledger that cannot be written is logged once.
  void save() noexcept;

 private:
  std::filesystem::path path_;
  int64_t day_ = 0;  // since 1970
  uint64_t bytes_ = 0;
  bool said_ = false;
};

}  // namespace orlop::nvme
