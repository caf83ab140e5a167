#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "formats/safetensors_header.h"

// The first byte decides how much data the file is said to hold; the rest is the header. What is
// accepted must cover that data exactly and come back from the writer's header unchanged.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t count) {
  if (count == 0) return 0;
  const size_t data_bytes = bytes[0];
  const std::string_view json(reinterpret_cast<const char*>(bytes) + 1, count - 1);
  orlop::SafetensorsHeader header;
  try {
    header = orlop::parse_safetensors_header(json, data_bytes, "fuzz");
  } catch (const orlop::Error& error) {
    if (error.code() != orlop::ErrorCode::kInvalidData) throw;
    return 0;
  }
  size_t covered = 0;
  for (const auto& entry : header.entries) {
    ORLOP_INVARIANT(entry.begin == covered);
    covered = entry.end;
  }
  ORLOP_INVARIANT(covered == data_bytes);
  const std::string written = orlop::make_safetensors_header(header, 4096);
  ORLOP_INVARIANT(written.size() % 4096 == 0);
  const auto again = orlop::parse_safetensors_header(
      std::string_view(written).substr(orlop::kSafetensorsLengthBytes), data_bytes, "again");
  ORLOP_INVARIANT(again.entries.size() == header.entries.size());
  ORLOP_INVARIANT(again.metadata == header.metadata);
  return 0;
}
