#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "orlop/types.h"

namespace orlop {

// A safetensors file: 8 bytes little-endian length of the header, the header (a JSON object), the
// data.
inline constexpr size_t kSafetensorsLengthBytes = 8;
// The limit of the reference implementation.
inline constexpr size_t kSafetensorsMaxHeaderBytes = 100'000'000;

inline constexpr const char* kSafetensorsMetadataKey = "__metadata__";

using SafetensorsMetadata = std::map<std::string, std::string>;

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  size_t begin = 0;  // byte offsets in the data section
  size_t end = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // in the order of their bytes
  SafetensorsMetadata metadata;
};

// Elements of a shape; negative when a dimension is negative or the product does not fit into
// int64_t.
int64_t shape_numel(const std::vector<int64_t>& shape);

// "[2, 3]"
std::string shape_text(const std::vector<int64_t>& shape);

// Checks the first 8 bytes of a file of `file_bytes` and returns the length of the header. Throws
// Error(kInvalidData), like parse_safetensors_header().
size_t parse_safetensors_length(uint64_t length, size_t file_bytes, const std::string& file);

// Reads the JSON of a header whose data section has `data_bytes`. Strict, as the reference
// implementation: the tensors cover the data exactly, without overlap, gap or rest, and every byte
// count fits shape and dtype. Throws Error(kInvalidData) with file, tensor and numbers.
SafetensorsHeader parse_safetensors_header(std::string_view json, size_t data_bytes,
                                           const std::string& file);

// The first bytes of a file, length included: the JSON is padded with spaces, so that the data
// begins at a multiple of `data_alignment`.
std::string make_safetensors_header(const SafetensorsHeader& header, size_t data_alignment);

}  // namespace orlop
