#pragma once

#include <map>
#include <string>

namespace orlop::bench {

// Seconds of a trace by "lane: name", numbers at the end of names left out.
std::map<std::string, double> trace_times(const std::string& path);

// From the beginning of a lane's first work, waits left out, to the end of its last.
double lane_seconds(const std::string& path, const std::string& lane);

// What the compute queue of a trace waits for.
struct ComputeWaits {
  double busy_seconds = 0;                     // its own work
  std::map<std::string, double> wait_seconds;  // by what it waits for: "wait for comm", ...
  double exposed_seconds = 0;  // of its waits for the comm queue, while that runs a collective
};
ComputeWaits compute_waits(const std::string& path);

}  // namespace orlop::bench
