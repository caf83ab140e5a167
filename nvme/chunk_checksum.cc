#include "nvme/chunk_checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>

#include "base/bytes.h"
#include "base/check.h"

namespace orlop::nvme {
namespace {

constexpr size_t kWindowBytes = 4 * kKiB;
constexpr size_t kWindowStride = kMiB;

}  // namespace

Verify parse_verify(std::string_view text) {
  if (text == "off") return Verify::kOff;
  if (text == "sample") return Verify::kSample;
  if (text == "full") return Verify::kFull;
  fail(ErrorCode::kUsage, "nvme.verify is \"{}\"; use off, sample or full", text);
}

uint64_t chunk_checksum(std::span<const std::byte> chunk, Verify verify, uint64_t seed) {
  if (verify == Verify::kOff) return 0;
  if (verify == Verify::kFull) return XXH3_64bits_withSeed(chunk.data(), chunk.size(), seed);
  uint64_t hash = seed;
  for (size_t begin = 0; begin < chunk.size(); begin += kWindowStride) {
    const size_t bytes = std::min(kWindowBytes, chunk.size() - begin);
    hash = XXH3_64bits_withSeed(chunk.data() + begin, bytes, hash);
  }
  const size_t tail = std::min(kWindowBytes, chunk.size());
  return XXH3_64bits_withSeed(chunk.data() + chunk.size() - tail, tail, hash);
}

}  // namespace orlop::nvme
