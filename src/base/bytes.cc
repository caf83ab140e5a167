#include "base/bytes.h"

#include <cctype>
#include <charconv>
#include <cmath>

#include "base/check.h"

namespace orlop {

std::string format_bytes(size_t bytes) {
  const double value = static_cast<double>(bytes);
  if (bytes >= kGiB) return fmt::format("{:.2f} GiB", value / static_cast<double>(kGiB));
  if (bytes >= kMiB) return fmt::format("{:.1f} MiB", value / static_cast<double>(kMiB));
  if (bytes >= kKiB) return fmt::format("{:.1f} KiB", value / static_cast<double>(kKiB));
  return fmt::format("{} B", bytes);
}

size_t parse_bytes(std::string_view text, std::string_view what) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [next, error] = std::from_chars(text.data(), end, value);
  std::string unit;
  for (const char* c = next; c != end; ++c) {
    if (*c != ' ') unit += static_cast<char>(std::tolower(static_cast<unsigned char>(*c)));
  }
  double factor = 0;
  if (unit.empty() || unit == "b") factor = 1;
  if (unit == "kib" || unit == "k") factor = static_cast<double>(kKiB);
  if (unit == "mib" || unit == "m") factor = static_cast<double>(kMiB);
  if (unit == "gib" || unit == "g") factor = static_cast<double>(kGiB);
  if (unit == "tib" || unit == "t") factor = static_cast<double>(kGiB) * 1024;
  if (unit == "kb") factor = 1e3;
  if (unit == "mb") factor = 1e6;
  if (unit == "gb") factor = 1e9;
  if (unit == "tb") factor = 1e12;
  check(error == std::errc() && factor > 0 && std::isfinite(value) && value >= 0 &&
            value * factor < 9e18,
        ErrorCode::kUsage, "{}: '{}' is not a size; write a number of bytes or e.g. 24GiB, 900MB",
        what, text);
  return static_cast<size_t>(value * factor);
}

}  // namespace orlop
