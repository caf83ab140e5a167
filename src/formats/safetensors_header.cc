#include "formats/safetensors_header.h"

#include <algorithm>
#include <array>
#include <bit>
#include <optional>

#include "base/bytes.h"
#include "base/check.h"
#include "formats/json_input.h"

namespace orlop {
namespace {

static_assert(std::endian::native == std::endian::little, "files are read as little-endian");

std::optional<DType> dtype_from_name(std::string_view name) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kF64, DType::kI64,
                            DType::kI32, DType::kI16, DType::kI8, DType::kU8, DType::kBool}) {
    if (dtype_name(dtype) == name) return dtype;
  }
  return std::nullopt;
}

SafetensorsMetadata parse_metadata(const nlohmann::json& value, const std::string& file) {
  const JsonFields fields(value, file, "__metadata__.");
  SafetensorsMetadata metadata;
  for (const auto& [key, text] : value.items()) {
    metadata[key] = fields.string(key.c_str());
  }
  return metadata;
}

SafetensorsEntry parse_entry(const std::string& name, const nlohmann::json& value,
                             size_t data_bytes, const std::string& file) {
  const JsonFields fields(value, file, name + ".");
  SafetensorsEntry entry;
  entry.name = name;

  const std::string dtype = fields.string("dtype");
  const auto known = dtype_from_name(dtype);
  check(known.has_value(), ErrorCode::kInvalidData,
        "'{}': tensor '{}' has dtype '{}', which is not supported (F64, F32, F16, BF16, I64, I32, "
        "I16, I8, U8, BOOL are)",
        file, name, dtype);
  entry.dtype = *known;

  for (const nlohmann::json& dim : fields.array("shape")) {
    if (!dim.is_number_unsigned() ||
        dim.get<uint64_t>() > static_cast<uint64_t>(JsonFields::kMaxInteger)) {
      fields.refuse("shape", "a list of non-negative integers");
    }
    entry.shape.push_back(dim.get<int64_t>());
  }

  const nlohmann::json& offsets = fields.array("data_offsets");
  if (offsets.size() != 2 || !offsets[0].is_number_unsigned() || !offsets[1].is_number_unsigned()) {
    fields.refuse("data_offsets", "a list of two non-negative integers");
  }
  const auto begin = offsets[0].get<uint64_t>();
  const auto end = offsets[1].get<uint64_t>();
  check(begin <= end, ErrorCode::kInvalidData,
        "'{}': tensor '{}' has data_offsets [{}, {}] that run backwards", file, name, begin, end);
  check(end <= data_bytes, ErrorCode::kInvalidData,
        "'{}': tensor '{}' ends at data byte {}, but the file holds only {} bytes of data: it is "
        "truncated",
        file, name, end, data_bytes);
  entry.begin = begin;
  entry.end = end;

  const int64_t numel = shape_numel(entry.shape);
  size_t bytes = 0;
  check(numel >= 0 &&
            !__builtin_mul_overflow(static_cast<size_t>(numel), dtype_bytes(entry.dtype), &bytes),
        ErrorCode::kInvalidData, "'{}': tensor '{}' has shape {}, whose bytes exceed 64 bits", file,
        name, shape_text(entry.shape));
  check(bytes == entry.end - entry.begin, ErrorCode::kInvalidData,
        "'{}': tensor '{}' of {} {} takes {} bytes, but its data_offsets [{}, {}] span {}", file,
        name, dtype, shape_text(entry.shape), bytes, begin, end, end - begin);
  return entry;
}

// The entries, sorted by offset, must cover [0, data_bytes) exactly.
void check_cover(const std::vector<SafetensorsEntry>& entries, size_t data_bytes,
                 const std::string& file) {
  size_t covered = 0;
  const SafetensorsEntry* previous = nullptr;
  for (const SafetensorsEntry& entry : entries) {
    check(entry.begin >= covered, ErrorCode::kInvalidData,
          "'{}': tensors '{}' and '{}' overlap: the second begins at data byte {}, the first ends "
          "at {}",
          file, previous ? previous->name : "", entry.name, entry.begin, covered);
    check(entry.begin == covered, ErrorCode::kInvalidData,
          "'{}': no tensor covers data bytes {} to {}, before tensor '{}'", file, covered,
          entry.begin, entry.name);
    covered = entry.end;
    previous = &entry;
  }
  check(covered == data_bytes, ErrorCode::kInvalidData,
        "'{}': the tensors end at data byte {}, but the file holds {} bytes of data ({} too many)",
        file, covered, data_bytes, data_bytes - covered);
}

}  // namespace

int64_t shape_numel(const std::vector<int64_t>& shape) {
  int64_t product = 1;
  for (const int64_t dim : shape) {
    if (dim < 0 || __builtin_mul_overflow(product, dim, &product)) return -1;
  }
  return product;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (const int64_t dim : shape) text += fmt::format("{}{}", text.size() > 1 ? ", " : "", dim);
  return text + "]";
}

size_t parse_safetensors_length(uint64_t length, size_t file_bytes, const std::string& file) {
  check(length <= kSafetensorsMaxHeaderBytes, ErrorCode::kInvalidData,
        "'{}': the header claims {} bytes, at most {} are allowed: not a safetensors file, or "
        "damaged",
        file, length, kSafetensorsMaxHeaderBytes);
  check(length <= file_bytes - kSafetensorsLengthBytes, ErrorCode::kInvalidData,
        "'{}': the header claims {} bytes, but the file has only {} behind its first {}: it is "
        "truncated",
        file, length, file_bytes - kSafetensorsLengthBytes, kSafetensorsLengthBytes);
  return length;
}

SafetensorsHeader parse_safetensors_header(std::string_view json, size_t data_bytes,
                                           const std::string& file) {
  check(!json.empty() && json.front() == '{', ErrorCode::kInvalidData,
        "'{}': the safetensors header does not begin with '{{'", file);
  const nlohmann::json root = parse_json(json, file);
  SafetensorsHeader header;
  for (const auto& [name, value] : root.items()) {
    if (name == kSafetensorsMetadataKey) {
      header.metadata = parse_metadata(value, file);
    } else {
      header.entries.push_back(parse_entry(name, value, data_bytes, file));
    }
  }
  std::sort(header.entries.begin(), header.entries.end(),
            [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
              return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
            });
  check_cover(header.entries, data_bytes, file);
  return header;
}

std::string make_safetensors_header(const SafetensorsHeader& header, size_t data_alignment) {
  nlohmann::ordered_json root = nlohmann::ordered_json::object();
  if (!header.metadata.empty()) root[kSafetensorsMetadataKey] = header.metadata;
  for (const SafetensorsEntry& entry : header.entries) {
    root[entry.name] = {{"dtype", dtype_name(entry.dtype)},
                        {"shape", entry.shape},
                        {"data_offsets", std::array<size_t, 2>{entry.begin, entry.end}}};
  }
  const std::string json = root.dump();
  const size_t total = align_up(kSafetensorsLengthBytes + json.size(), data_alignment);
  const uint64_t length = total - kSafetensorsLengthBytes;
  std::string bytes(reinterpret_cast<const char*>(&length), sizeof(length));
  bytes += json;
  bytes.resize(total, ' ');
  return bytes;
}

}  // namespace orlop
