#include "nvme/write_ledger.h"

#include <ctime>
#include <fstream>
#include <utility>

#include "base/log.h"

namespace orlop::nvme {
namespace {

int64_t today() {
  constexpr int64_t kSecondsPerDay = 86'400;
  return std::time(nullptr) / kSecondsPerDay;
}

}  // namespace

WriteLedger::WriteLedger(std::string path) : path_(std::move(path)) {
  int64_t day = 0;
  uint64_t bytes = 0;
  if (!path_.empty() && std::ifstream(path_) >> day >> bytes) {
    day_ = day;
    bytes_ = bytes;
  }
}

void WriteLedger::add(uint64_t bytes) {
  bytes_ = bytes_today() + bytes;
  day_ = today();
}

uint64_t WriteLedger::bytes_today() const { return day_ == today() ? bytes_ : 0; }

void WriteLedger::save() noexcept {
  if (path_.empty()) return;
  std::ofstream file(path_, std::ios::trunc);
  file << day_ << ' ' << bytes_ << '\n';
  if (file.flush() || std::exchange(said_, true)) return;
  log_warning("cannot write {}: the limit of writes per day counts this run alone", path_);
}

}  // namespace orlop::nvme
