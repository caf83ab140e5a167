#pragma once

#include <string>

#include "orlop/export.h"

namespace orlop {

struct MeasureConfig {
  std::string device = "auto";  // as EngineConfig::device
  int threads = 0;              // as EngineConfig::threads
  std::string drive;            // a directory on the drive to measure; empty: none
};

struct MeasuredHardware {
  std::string json;  // the profile, rates per second
  std::string path;  // the file in which it was kept
};

// Measures what plans predict times from: matmuls in every precision, copies in both directions,
// device memory, the optimizer on the host, collectives of all GPUs where there are several and,
// where a directory is given, its drive. Keeps the result in the user's cache, where every later
// plan for this device on this kind of processor finds it. Takes seconds, about 0.5 GB of host
// memory and 1 GB of device memory, and of the drive 256 MB that are removed. Throws Error(kDevice,
// kDoesNotFit, kUsage, kIo).
ORLOP_EXPORT MeasuredHardware measure_hardware(const MeasureConfig& config);

}  // namespace orlop
