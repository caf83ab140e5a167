#include "engine/ranks.h"
#include "orlop/ranks.h"

namespace orlop {

Ranks::Ranks() : ranks_(join_host_ranks()) {}
Ranks::~Ranks() = default;

int Ranks::rank() const { return ranks_->rank(); }
int Ranks::world_size() const { return ranks_->world_size(); }

void Ranks::barrier(const std::string& what) { ranks_->barrier(what); }

std::string Ranks::from_first(const std::string& value) {
  std::string text = value;
  size_t bytes = text.size();
  ranks_->broadcast_values(std::as_writable_bytes(std::span(&bytes, 1)), 0, "a text's length");
  text.resize(bytes);
  ranks_->broadcast_values(std::as_writable_bytes(std::span(text)), 0, "a text");
  return text;
}

bool Ranks::any(bool value) {
  return most_over_ranks(*ranks_, "any of all ranks", value ? 1 : 0) != 0;
}

}  // namespace orlop
