#include "nvme/write_ledger.h"

#include <fmt/format.h>

#include <ctime>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/numbered_name.h"

namespace orlop::nvme {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "orlop-r";
constexpr std::string_view kSuffix = ".writes";

int64_t today() {
  constexpr int64_t kSecondsPerDay = 86'400;
  return std::time(nullptr) / kSecondsPerDay;
}

uint64_t read_today(const fs::path& path) {
  int64_t day = 0;
  uint64_t bytes = 0;
  return std::ifstream(path) >> day >> bytes && day == today() ? bytes : 0;
}

std::vector<fs::path> files_of_ranks_from(const fs::path& directory, int first) {
  std::vector<fs::path> files;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory, error)) {
    const std::string name = entry.path().filename().string();
    if (number_in(name, kPrefix, kSuffix) >= first) files.push_back(entry.path());
  }
  return files;
}

}  // namespace

// Several ranks may see a file that nobody owns any more: the one that can rename it has it.
WriteLedger::WriteLedger(const fs::path& directory, int rank, int world_size)
    : path_(directory / fmt::format("{}{}{}", kPrefix, rank, kSuffix)) {
  add(read_today(path_));
  for (const fs::path& file : files_of_ranks_from(directory, world_size)) {
    const fs::path taken = path_.string() + ".taken";
    std::error_code error;
    fs::rename(file, taken, error);
    if (error) continue;
    add(read_today(taken));
    save();
    fs::remove(taken, error);
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
  log_warning("cannot write {}: the limit of writes per day counts this run alone", path_.string());
}

}  // namespace orlop::nvme
