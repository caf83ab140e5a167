#include "base/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <cstdlib>
#include <memory>
#include <string>

namespace orlop {
namespace {

spdlog::level::level_enum to_spdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

// Lives for the whole process, so that threads may log while it ends.
spdlog::logger& logger() {
  static spdlog::logger* const instance = [] {
    auto* made = new spdlog::logger("orlop", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    const char* level = std::getenv("ORLOP_LOG");
    made->set_level(level ? spdlog::level::from_str(level) : spdlog::level::warn);
    made->set_pattern("[orlop] [%l] %v");
    return made;
  }();
  return *instance;
}

}  // namespace

void log_line(LogLevel level, std::string_view text) { logger().log(to_spdlog(level), text); }

}  // namespace orlop
