#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "orlop/plan.h"

namespace orlop {

// Counters since the engine was opened.
struct Stats {
  int64_t steps = 0;
  int64_t skipped_steps = 0;
  uint64_t uploaded_bytes = 0;
  uint64_t offloaded_bytes = 0;
  // From and to the drives, checkpoints not counted, by all ranks on this machine: of the others as
  // of the last step's beginning.
  uint64_t nvme_read_bytes = 0;
  uint64_t nvme_written_bytes = 0;
  uint64_t nvme_written_today_bytes = 0;  // since midnight UTC; over all runs where a limit is set
  size_t device_peak_bytes = 0;           // arena and device overhead as taken
  size_t host_bytes = 0;                  // arena as taken
  double optimizer_seconds = 0;           // time inside host updates
  double optimizer_exposed_seconds = 0;   // of it, time the main thread waited
  double swap_wait_seconds = 0;           // time that host updates waited for drives
  double save_held_seconds = 0;           // time host updates waited for saves in the background
};

}  // namespace orlop
