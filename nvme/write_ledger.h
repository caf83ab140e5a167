#pragma once

#include <cstdint>
#include <string>

namespace orlop::nvme {

// Counts bytes written since midnight UTC, over all runs that use the same file, so that a limit
// per day holds when a run is started again. Not thread-safe.
class WriteLedger {
 public:
  // Takes over what `path` says about today; a file that is missing or unreadable counts as
  // nothing. An empty path keeps the count in memory only.
  explicit WriteLedger(std::string path = {});

  void add(uint64_t bytes);
  uint64_t bytes_today() const;
  // Writes the file. Never throws: a ledger that cannot be written is logged once.
  void save() noexcept;

 private:
  std::string path_;
  int64_t day_ = 0;  // since 1970
  uint64_t bytes_ = 0;
  bool said_ = false;
};

}  // namespace orlop::nvme
