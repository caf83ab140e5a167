#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "formats/hf_config.h"

// Any text is either read or refused as invalid data.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t count) {
  try {
    orlop::parse_hf_config({reinterpret_cast<const char*>(bytes), count}, "fuzz");
  } catch (const orlop::Error& error) {
    if (error.code() != orlop::ErrorCode::kInvalidData) throw;
  }
  return 0;
}
