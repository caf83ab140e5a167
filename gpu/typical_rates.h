#pragma once

#include "backend/backend.h"

namespace orlop {

// What a driver tells of a chip.
struct ChipTraits {
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  double clock_hz = 0;         // the highest
  double memory_clock_hz = 0;  // two transfers each
  int memory_bus_bits = 0;
};
ChipTraits chip_traits(int device);

// What such a chip reaches in practice, for plans before anything was measured. Zeros for a chip
// that is not known.
TypicalRates typical_rates(const ChipTraits& chip);

}  // namespace orlop
