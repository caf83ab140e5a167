#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "memory/host_arena.h"
#include "memory/slot_pool.h"
#include "nvme/swapper.h"

namespace orlop::bench {

enum class Pattern { kRead, kWrite, kMixed };

struct Figure {
  double gb_per_s = 0;  // 1e9 bytes
  double cpu_s_per_gb = 0;
};

struct SwapRigOptions {
  std::vector<std::string> directories;
  size_t bytes = 0;        // of all chunks
  size_t chunk_bytes = 0;  // a multiple of 4096
  nvme::IoQueueOptions queue;
  nvme::IoEngine engine = nvme::IoEngine::kAuto;
  bool direct = true;
};

// The swap files of one engine and six slots, with nothing to do but move chunks: what the drives
// give through the Swapper. CPU is user and system time of all threads of the process.
class SwapRig {
 public:
  explicit SwapRig(const SwapRigOptions& options);

  // All chunks once; mixed: every second one is read, the others are written beside.
  Figure run(Pattern pattern);

  size_t bytes() const { return static_cast<size_t>(chunks_) * chunk_bytes_; }
  const nvme::Swapper& swapper() const { return swapper_; }

 private:
  const size_t chunk_bytes_;
  const int32_t chunks_;
  HostArena arena_;  // the engine's slots are in one as well: huge pages are part of the figure
  std::span<std::byte> memory_;
  SlotPool pool_;
  nvme::Swapper swapper_;
  int64_t step_ = 0;
};

}  // namespace orlop::bench
