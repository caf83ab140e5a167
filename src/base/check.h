#pragma once

#include <fmt/format.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "orlop/error.h"

namespace orlop {

// Throws Error(code) with a formatted message.
template <typename... Args>
[[noreturn]] void fail(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(code, fmt::format(format, std::forward<Args>(args)...));
}

// Throws unless `condition` holds. For input, files and devices; never compiled out.
template <typename... Args>
void check(bool condition, ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  if (!condition) [[unlikely]] {
    fail(code, format, std::forward<Args>(args)...);
  }
}

// Text of an errno value, thread-safe.
inline std::string errno_text(int error) { return std::generic_category().message(error); }

}  // namespace orlop

// Guards a promise of the engine itself; a failure is a defect of Orlop, never of its input.
#define ORLOP_INVARIANT(condition)                                                          \
  do {                                                                                      \
    if (!(condition)) [[unlikely]] {                                                        \
      ::orlop::fail(::orlop::ErrorCode::kInternal, "{}:{}: broken invariant: {}", __FILE__, \
                    __LINE__, #condition);                                                  \
    }                                                                                       \
  } while (false)
