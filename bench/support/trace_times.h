#pragma once

#include <map>
#include <string>
#include <vector>

namespace orlop::bench {

// One piece of work, or one wait ("wait..."), of a trace.
struct TraceSpan {
  std::string lane;  // "compute", "gpu compute"
  std::string name;
  double begin = 0;  // seconds on the machine's monotonic clock
  double end = 0;

  bool is_wait() const { return name.starts_with("wait"); }
};
std::vector<TraceSpan> read_trace(const std::string& path);

// Seconds of a trace by "lane: name", numbers at the end of names left out.
std::map<std::string, double> trace_times(const std::string& path);

// From the beginning of a lane's first work, waits left out, to the end of its last.
double lane_seconds(const std::string& path, const std::string& lane);

}  // namespace orlop::bench
