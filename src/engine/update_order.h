#pragma once

#include <cstddef>
#include <utility>
#include <variant>
#include <vector>

#include "optim/optimizer_queue.h"

namespace orlop {

// One chunk's part of an update: three operations that share a slot.
struct ChunkUpdate {
  HostUpdate in, adam, out;
};

// Puts the operations of a batch in the order in which drives and processor work side by side:
// `ahead` chunks are on their way in, or in work, while the one before them goes out.
class UpdateOrder {
 public:
  UpdateOrder(std::vector<HostUpdate>& batch, size_t ahead) : batch_(batch), ahead_(ahead) {}

  // Updates in the order of the calls; they are in the batch after finish().
  void add(HostUpdate update) { parts_.emplace_back(std::move(update)); }
  void add(std::vector<ChunkUpdate> chunks) {
    for (ChunkUpdate& chunk : chunks) parts_.emplace_back(std::move(chunk));
  }
  void finish();

 private:
  using Part = std::variant<HostUpdate, ChunkUpdate>;

  void swap_in_ahead();

  std::vector<HostUpdate>& batch_;
  size_t ahead_;
  std::vector<Part> parts_;
  size_t next_in_ = 0;      // of parts_: what may be the next chunk to come in
  size_t chunks_in_ = 0;    // that come in so far
  size_t chunks_done_ = 0;  // of them updated
};

}  // namespace orlop
