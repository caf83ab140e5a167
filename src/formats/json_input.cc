#include "formats/json_input.h"

#include <set>
#include <utility>

#include "base/check.h"

namespace orlop {
namespace {

constexpr size_t kMaxDepth = 64;
constexpr size_t kMaxExcerpt = 80;

// Builds the value and refuses what the JSON library would take in silence.
class StrictHandler {
 public:
  explicit StrictHandler(const std::string& file) : file_(file) {}

  bool operator()(int depth, nlohmann::json::parse_event_t event, const nlohmann::json& parsed) {
    using Event = nlohmann::json::parse_event_t;
    if (event == Event::object_start || event == Event::array_start) {
      check(static_cast<size_t>(depth) < kMaxDepth, ErrorCode::kInvalidData,
            "'{}': JSON is nested more than {} levels deep", file_, kMaxDepth);
    }
    if (event == Event::object_start) keys_.emplace_back();
    if (event == Event::object_end) keys_.pop_back();
    if (event == Event::key) {
      check(keys_.back().insert(parsed.get_ref<const std::string&>()).second,
            ErrorCode::kInvalidData, "'{}': the key {} stands twice in one JSON object", file_,
            json_excerpt(parsed));
    }
    return true;
  }

 private:
  const std::string& file_;
  std::vector<std::set<std::string>> keys_;
};

bool is_integer(const nlohmann::json& value, int64_t min, int64_t max) {
  if (!value.is_number_integer()) return false;
  if (value.is_number_unsigned() &&
      value.get<uint64_t>() > static_cast<uint64_t>(JsonFields::kMaxInteger)) {
    return false;
  }
  const auto number = value.get<int64_t>();
  return number >= min && number <= max;
}

std::string integer_range(int64_t min, int64_t max) {
  if (max == JsonFields::kMaxInteger) return fmt::format("an integer of at least {}", min);
  return fmt::format("an integer from {} to {}", min, max);
}

}  // namespace

nlohmann::json parse_json(std::string_view text, const std::string& file) {
  try {
    return nlohmann::json::parse(text.begin(), text.end(), StrictHandler(file));
  } catch (const nlohmann::json::parse_error& error) {
    fail(ErrorCode::kInvalidData, "'{}': no valid JSON at byte {} of {}", file, error.byte,
         text.size());
  } catch (const nlohmann::json::exception& error) {
    fail(ErrorCode::kInvalidData, "'{}': no valid JSON: {}", file, error.what());
  }
}

std::string json_excerpt(const nlohmann::json& value) {
  if (value.is_object()) return fmt::format("an object of {} fields", value.size());
  if (value.is_array() && value.size() > 8) return fmt::format("a list of {}", value.size());
  std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  if (text.size() > kMaxExcerpt) text = text.substr(0, kMaxExcerpt) + "...";
  return text;
}

JsonFields::JsonFields(const nlohmann::json& object, std::string file, std::string path)
    : object_(&object), file_(std::move(file)), path_(std::move(path)) {
  check(object.is_object(), ErrorCode::kInvalidData, "'{}': {} must be a JSON object, found {}",
        file_, path_.empty() ? "the text" : "'" + path_.substr(0, path_.size() - 1) + "'",
        json_excerpt(object));
}

bool JsonFields::contains(const char* key) const { return object_->contains(key); }

const nlohmann::json* JsonFields::find(const char* key) const {
  const auto found = object_->find(key);
  return found == object_->end() || found->is_null() ? nullptr : &*found;
}

int64_t JsonFields::integer(const char* key, int64_t min, int64_t max) const {
  required(key, integer_range(min, max));
  return *optional_integer(key, min, max);
}

std::string JsonFields::string(const char* key) const {
  required(key, "a string");
  return *optional_string(key);
}

JsonFields JsonFields::object(const char* key) const {
  return JsonFields(required(key, "an object"), file_, path_ + key + ".");
}

const nlohmann::json& JsonFields::array(const char* key) const {
  const nlohmann::json& value = required(key, "a list");
  if (!value.is_array()) refuse(key, "a list");
  return value;
}

std::optional<int64_t> JsonFields::optional_integer(const char* key, int64_t min,
                                                    int64_t max) const {
  const nlohmann::json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!is_integer(*value, min, max)) refuse(key, integer_range(min, max));
  return value->get<int64_t>();
}

std::optional<double> JsonFields::optional_number(const char* key) const {
  const nlohmann::json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number()) refuse(key, "a number");
  return value->get<double>();
}

std::optional<bool> JsonFields::optional_boolean(const char* key) const {
  const nlohmann::json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) refuse(key, "true or false");
  return value->get<bool>();
}

std::optional<std::string> JsonFields::optional_string(const char* key) const {
  const nlohmann::json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) refuse(key, "a string");
  return value->get<std::string>();
}

std::optional<JsonFields> JsonFields::optional_object(const char* key) const {
  const nlohmann::json* value = find(key);
  if (value == nullptr) return std::nullopt;
  return JsonFields(*value, file_, path_ + key + ".");
}

std::vector<std::string> JsonFields::string_list(const char* key) const {
  const nlohmann::json* value = find(key);
  if (value == nullptr) return {};
  if (!value->is_array()) refuse(key, "a list of strings");
  std::vector<std::string> list;
  for (const nlohmann::json& entry : *value) {
    if (!entry.is_string()) refuse(key, "a list of strings");
    list.push_back(entry.get<std::string>());
  }
  return list;
}

void JsonFields::refuse(const char* key, std::string_view expected) const {
  const auto found = object_->find(key);
  fail(ErrorCode::kInvalidData, "'{}': '{}{}' must be {}, found {}", file_, path_, key, expected,
       found == object_->end() ? "nothing" : json_excerpt(*found));
}

const nlohmann::json& JsonFields::required(const char* key, std::string_view expected) const {
  const auto found = object_->find(key);
  if (found == object_->end()) {
    fail(ErrorCode::kInvalidData, "'{}': '{}{}' is missing; it must be {}", file_, path_, key,
         expected);
  }
  if (found->is_null()) refuse(key, expected);
  return *found;
}

}  // namespace orlop
