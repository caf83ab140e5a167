#include "comm/communicator.h"

#include <vector>

namespace orlop {

void Communicator::all_reduce_sum(std::span<double> values, std::string_view what) {
  const size_t ranks = static_cast<size_t>(world_size());
  std::vector<double> rows(values.size() * ranks);
  all_gather_values(std::as_bytes(values), std::as_writable_bytes(std::span(rows)), what);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = rows[i];
    for (size_t r = 1; r < ranks; ++r) values[i] += rows[r * values.size() + i];
  }
}

void Communicator::barrier(std::string_view what) { all_gather_values({}, {}, what); }

}  // namespace orlop
