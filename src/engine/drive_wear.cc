#include "engine/drive_wear.h"

#include <algorithm>
#include <span>

#include "base/bytes.h"
#include "base/check.h"

namespace orlop {

DriveWear::DriveWear(SwapSpace* swap, Communicator& ranks, const LocalRanks& local,
                     std::optional<uint64_t> writes_per_day)
    : swap_(swap),
      ranks_(ranks),
      machines_(local.machines),
      limit_(writes_per_day),
      shares_(static_cast<size_t>(ranks.world_size())) {}

DriveWear::Counts DriveWear::own() const {
  const nvme::SwapStats moved = swap_->swapper().stats();
  return {moved.bytes_read, moved.bytes_written, moved.day_bytes_written};
}

void DriveWear::begin_step() {
  if (swap_ == nullptr) return;
  swap_->swapper().begin_step();
  // What the update that still runs has yet to write is not in the count of the day.
  Share share{own(), 0};
  const uint64_t pending = expected_writes_ - std::min(expected_writes_, share.counts.written);
  share.coming = pending + swap_->bytes_written_per_step();
  ranks_.all_gather_values(std::as_bytes(std::span(&share, 1)),
                           std::as_writable_bytes(std::span(shares_)), "drives");
  if (limit_) check_limit();
  expected_writes_ = share.counts.written + share.coming;
}

// Every rank looks at every machine, so that all of them stop.
void DriveWear::check_limit() const {
  for (size_t first = 0; first < machines_.size(); ++first) {
    uint64_t written = 0;
    uint64_t coming = 0;
    int ranks = 0;
    for (size_t rank = first; rank < machines_.size(); ++rank) {
      if (machines_[rank] != static_cast<int>(first)) continue;
      written += shares_[rank].counts.written_today;
      coming += shares_[rank].coming;
      ++ranks;
    }
    check(
        written + coming <= *limit_, ErrorCode::kDoesNotFit,
        "limits.nvme_writes_per_day is {}: {} were written since midnight UTC{} and the next step "
        "writes {}; raise the limit or keep more of the states in host memory",
        format_bytes(*limit_), format_bytes(written),
        machines_.size() > 1 ? fmt::format(" by {} ranks on the machine of rank {}", ranks, first)
                             : "",
        format_bytes(coming));
  }
}

DriveWear::Counts DriveWear::counts() const {
  if (swap_ == nullptr) return {};
  Counts sum = own();
  for (size_t rank = 0; rank < machines_.size(); ++rank) {
    const bool is_other = static_cast<int>(rank) != ranks_.rank();
    if (!is_other || machines_[rank] != machines_[static_cast<size_t>(ranks_.rank())]) continue;
    sum.read += shares_[rank].counts.read;
    sum.written += shares_[rank].counts.written;
    sum.written_today += shares_[rank].counts.written_today;
  }
  return sum;
}

}  // namespace orlop
