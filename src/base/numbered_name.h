#pragma once

#include <charconv>
#include <string_view>
#include <system_error>

namespace orlop {

// N of "<prefix>N<suffix>"; -1 for any other name.
inline int number_in(std::string_view name, std::string_view prefix, std::string_view suffix) {
  if (!name.starts_with(prefix) || !name.ends_with(suffix)) return -1;
  if (name.size() < prefix.size() + suffix.size()) return -1;
  name.remove_prefix(prefix.size());
  name.remove_suffix(suffix.size());
  int number = -1;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
  return error == std::errc() && end == name.data() + name.size() ? number : -1;
}

}  // namespace orlop
