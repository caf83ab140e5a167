#pragma once

#include <map>
#include <string>
#include <vector>

#include "bench/support/trace_times.h"

namespace orlop::bench {

// Seconds by cause: "update" (a gate that the host's update opens), a queue that works ("compute",
// "upload", "offload", "comm": rounding behind a reduction), or "idle": the queue was between two
// operations, or had none.
using WaitCauses = std::map<std::string, double>;

// What one rank's compute queue waits for.
struct RankWaits {
  double compute_seconds = 0;  // it works
  double exposed_seconds = 0;  // it waits while a collective moves: all ranks have joined it
  WaitCauses own;              // for this rank
  WaitCauses others;  // in a collective that another rank has not joined, by what keeps that

  double own_seconds() const;
  double others_seconds() const;
};

// Traces of the same steps, one per rank, on one clock. A collective moves once the last rank has
// joined it; until then whoever waits in it waits for what keeps that rank. The k-th collective of
// every rank is the same one.
//
// A rank joins when its comm queue reaches the collective, so that a kernel which then waits for
// room on the device counts as communication. Clocks of devices are some tens of microseconds
// apart, and so much of a collective may be on the wrong side. Throws Error(kUsage) when the traces
// do not hold the same collectives.
std::vector<RankWaits> rank_waits(const std::vector<std::vector<TraceSpan>>& traces);

}  // namespace orlop::bench
