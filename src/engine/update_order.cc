#include "engine/update_order.h"

namespace orlop {

void UpdateOrder::finish() {
  for (Part& part : parts_) {
    swap_in_ahead();
    if (auto* update = std::get_if<HostUpdate>(&part)) {
      batch_.push_back(std::move(*update));
      continue;
    }
    auto& chunk = std::get<ChunkUpdate>(part);
    batch_.push_back(std::move(chunk.adam));
    batch_.push_back(std::move(chunk.out));
    ++chunks_done_;
  }
}

void UpdateOrder::swap_in_ahead() {
  for (; next_in_ < parts_.size() && chunks_in_ < chunks_done_ + ahead_; ++next_in_) {
    auto* chunk = std::get_if<ChunkUpdate>(&parts_[next_in_]);
    if (chunk == nullptr) continue;
    batch_.push_back(std::move(chunk->in));
    ++chunks_in_;
  }
}

}  // namespace orlop
