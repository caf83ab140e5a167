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
  size_t device_peak_bytes = 0;          // arena and device overhead as taken
  size_t host_bytes = 0;                 // arena as taken
  double optimizer_seconds = 0;          // time inside host updates
  double optimizer_exposed_seconds = 0;  // of it, time the main thread waited
  double save_held_seconds = 0;          // time host updates waited for saves in the background
};

}  // namespace orlop
