#pragma once

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace orlop {

// JSON from outside, read strictly. Every fault is an Error(kInvalidData) that names the file, the
// field and the value found.

// Parses `text`, which is called `file` in errors. Refuses duplicate keys and nesting beyond 64
// levels.
nlohmann::json parse_json(std::string_view text, const std::string& file);

// "12", "\"text\"", "null", cut to a length that fits into a message.
std::string json_excerpt(const nlohmann::json& value);

// The fields of one JSON object. An optional field may be absent or null; a required one may not.
// Both views borrow: `object` outlives this.
class JsonFields {
 public:
  static constexpr int64_t kMaxInteger = std::numeric_limits<int64_t>::max();

  // `path` is what stands before the field names in errors, e.g. "rope_scaling."; empty at the top.
  JsonFields(const nlohmann::json& object, std::string file, std::string path = "");

  // Present, also when it is null.
  bool contains(const char* key) const;
  // The value, or null where the field is absent or null.
  const nlohmann::json* find(const char* key) const;

  int64_t integer(const char* key, int64_t min, int64_t max = kMaxInteger) const;
  std::string string(const char* key) const;
  JsonFields object(const char* key) const;
  const nlohmann::json& array(const char* key) const;

  std::optional<int64_t> optional_integer(const char* key, int64_t min,
                                          int64_t max = kMaxInteger) const;
  std::optional<double> optional_number(const char* key) const;
  std::optional<bool> optional_boolean(const char* key) const;
  std::optional<std::string> optional_string(const char* key) const;
  std::optional<JsonFields> optional_object(const char* key) const;
  // Empty when absent.
  std::vector<std::string> string_list(const char* key) const;

  const nlohmann::json& json() const { return *object_; }
  const std::string& file() const { return file_; }

  [[noreturn]] void refuse(const char* key, std::string_view expected) const;

 private:
  const nlohmann::json& required(const char* key, std::string_view expected) const;

  const nlohmann::json* object_;
  std::string file_;
  std::string path_;
};

}  // namespace orlop
