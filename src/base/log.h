#pragma once

#include <fmt/format.h>

#include <string_view>
#include <utility>

namespace orlop {

enum class LogLevel : int { kDebug, kInfo, kWarning, kError };

// Writes one line to standard error. The level is set by ORLOP_LOG (debug, info, warning, error; by
// default warning, so that an ordinary run is quiet).
void log_line(LogLevel level, std::string_view text);

template <typename... Args>
void log_info(fmt::format_string<Args...> format, Args&&... args) {
  log_line(LogLevel::kInfo, fmt::format(format, std::forward<Args>(args)...));
}

template <typename... Args>
void log_warning(fmt::format_string<Args...> format, Args&&... args) {
  log_line(LogLevel::kWarning, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace orlop
