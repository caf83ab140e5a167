#include "bench/support/trace_times.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

namespace orlop::bench {

std::vector<TraceSpan> read_trace(const std::string& path) {
  std::ifstream in(path);
  const nlohmann::json document = nlohmann::json::parse(in);
  const nlohmann::json& events = document.at("traceEvents");
  const double origin = std::stod(document.at("otherData").at("originUs").get<std::string>());
  std::map<int, std::string> lanes;
  for (const nlohmann::json& event : events) {
    if (event.at("ph") == "M" && event.at("name") == "thread_name")
      lanes[event.at("tid").get<int>()] = event.at("args").at("name").get<std::string>();
  }
  std::vector<TraceSpan> spans;
  for (const nlohmann::json& event : events) {
    if (event.at("ph") != "X") continue;
    const double begin = (origin + event.at("ts").get<double>()) * 1e-6;
    spans.push_back({lanes[event.at("tid").get<int>()], event.at("name").get<std::string>(), begin,
                     begin + event.at("dur").get<double>() * 1e-6});
  }
  return spans;
}

std::map<std::string, double> trace_times(const std::string& path) {
  std::map<std::string, double> seconds;
  for (TraceSpan& span : read_trace(path)) {
    span.name.erase(span.name.find_last_not_of(" 0123456789") + 1);
    seconds[span.lane + ": " + span.name] += span.end - span.begin;
  }
  return seconds;
}

double lane_seconds(const std::string& path, const std::string& lane) {
  double begin = std::numeric_limits<double>::infinity();
  double end = 0;
  for (const TraceSpan& span : read_trace(path)) {
    if (!span.lane.ends_with(lane) || span.is_wait()) continue;
    begin = std::min(begin, span.begin);
    end = std::max(end, span.end);
  }
  return std::max(0.0, end - begin);
}

}  // namespace orlop::bench
