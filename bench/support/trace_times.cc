#include "bench/support/trace_times.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <vector>

namespace orlop::bench {
namespace {

struct Span {
  std::string lane;
  std::string name;
  double begin = 0;  // seconds
  double end = 0;
};

std::vector<Span> read_spans(const std::string& path) {
  std::ifstream in(path);
  const nlohmann::json document = nlohmann::json::parse(in);
  const nlohmann::json& events = document.is_array() ? document : document.at("traceEvents");
  std::map<int, std::string> lanes;
  for (const nlohmann::json& event : events) {
    if (event.at("ph") == "M" && event.at("name") == "thread_name")
      lanes[event.at("tid").get<int>()] = event.at("args").at("name").get<std::string>();
  }
  std::vector<Span> spans;
  for (const nlohmann::json& event : events) {
    if (event.at("ph") != "X") continue;
    const double begin = event.at("ts").get<double>() * 1e-6;
    spans.push_back({lanes[event.at("tid").get<int>()], event.at("name").get<std::string>(), begin,
                     begin + event.at("dur").get<double>() * 1e-6});
  }
  return spans;
}

bool is_wait(const Span& span) { return span.name.starts_with("wait"); }

// What two rows of spans have in common; those of a row do not meet, as those of a queue.
double common_seconds(std::vector<Span> a, std::vector<Span> b) {
  const auto earlier = [](const Span& x, const Span& y) { return x.begin < y.begin; };
  std::sort(a.begin(), a.end(), earlier);
  std::sort(b.begin(), b.end(), earlier);
  double seconds = 0;
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    seconds += std::max(0.0, std::min(a[i].end, b[j].end) - std::max(a[i].begin, b[j].begin));
    a[i].end < b[j].end ? ++i : ++j;
  }
  return seconds;
}

}  // namespace

std::map<std::string, double> trace_times(const std::string& path) {
  std::map<std::string, double> seconds;
  for (Span& span : read_spans(path)) {
    span.name.erase(span.name.find_last_not_of(" 0123456789") + 1);
    seconds[span.lane + ": " + span.name] += span.end - span.begin;
  }
  return seconds;
}

double lane_seconds(const std::string& path, const std::string& lane) {
  double begin = std::numeric_limits<double>::infinity();
  double end = 0;
  for (const Span& span : read_spans(path)) {
    if (!span.lane.ends_with(lane) || is_wait(span)) continue;
    begin = std::min(begin, span.begin);
    end = std::max(end, span.end);
  }
  return std::max(0.0, end - begin);
}

ComputeWaits compute_waits(const std::string& path) {
  ComputeWaits waits;
  std::vector<Span> for_comm;
  std::vector<Span> collectives;
  for (const Span& span : read_spans(path)) {
    if (span.lane.ends_with("comm") && !is_wait(span)) collectives.push_back(span);
    if (!span.lane.ends_with("compute")) continue;
    if (!is_wait(span)) {
      waits.busy_seconds += span.end - span.begin;
      continue;
    }
    waits.wait_seconds[span.name] += span.end - span.begin;
    if (span.name == "wait for comm") for_comm.push_back(span);
  }
  waits.exposed_seconds = common_seconds(std::move(for_comm), std::move(collectives));
  return waits;
}

}  // namespace orlop::bench
