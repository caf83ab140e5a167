#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace orlop::nvme {

// kSample hashes 4 KiB of every MiB, the first and the last bytes included: it finds lost, torn and
// misplaced writes at 1/256 of the cost. kFull finds every changed bit.
enum class Verify : uint8_t { kOff, kSample, kFull };

// "off", "sample" or "full". Throws Error(kUsage).
Verify parse_verify(std::string_view text);

// XXH3 of what `verify` covers of the chunk; 0 when it is off. `seed` is part of the hash: the
// chunk's place and version, so that an old or misplaced chunk does not match.
uint64_t chunk_checksum(std::span<const std::byte> chunk, Verify verify, uint64_t seed);

}  // namespace orlop::nvme
