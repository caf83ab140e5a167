#include "bench/support/trace_times.h"

#include <fstream>
#include <nlohmann/json.hpp>

namespace orlop::bench {

std::map<std::string, double> trace_times(const std::string& path) {
  std::ifstream in(path);
  const nlohmann::json document = nlohmann::json::parse(in);
  const nlohmann::json& events = document.is_array() ? document : document.at("traceEvents");
  std::map<int, std::string> lanes;
  for (const nlohmann::json& event : events) {
    if (event.at("ph") == "M" && event.at("name") == "thread_name")
      lanes[event.at("tid").get<int>()] = event.at("args").at("name").get<std::string>();
  }
  std::map<std::string, double> seconds;
  for (const nlohmann::json& event : events) {
    if (event.at("ph") != "X") continue;
    std::string name = event.at("name").get<std::string>();
    name.erase(name.find_last_not_of(" 0123456789") + 1);
    seconds[lanes[event.at("tid").get<int>()] + ": " + name] +=
        event.at("dur").get<double>() * 1e-6;
  }
  return seconds;
}

}  // namespace orlop::bench
