#include "engine/gather_states.h"

namespace orlop {
namespace {

// Hands each rank's part of [offset, offset + numel) to `read` on that rank and to the others by
// broadcast. `read(offset in the FlatParam, bytes)`.
template <typename Read>
void gather(Communicator& ranks, const StateStore& states, int param, int64_t offset,
            std::span<std::byte> out, size_t element, std::string_view what, const Read& read) {
  const int64_t numel = static_cast<int64_t>(out.size() / element);
  for (int rank = 0; rank < ranks.world_size(); ++rank) {
    const ElementRange part = states.part_of_rank(param, rank, offset, numel);
    if (part.numel == 0) continue;
    const std::span<std::byte> bytes =
        out.subspan(static_cast<size_t>(part.begin - offset) * element,
                    static_cast<size_t>(part.numel) * element);
    if (rank == ranks.rank()) read(part.begin, bytes);
    if (ranks.world_size() > 1) ranks.broadcast_values(bytes, rank, what);
  }
}

}  // namespace

void gather_plane(Communicator& ranks, StateStore& states, int param, Plane plane, int64_t offset,
                  std::span<float> values, std::string_view what) {
  gather(ranks, states, param, offset, std::as_writable_bytes(values), sizeof(float), what,
         [&](int64_t begin, std::span<std::byte> bytes) {
           states.read(param, plane, begin,
                       {reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float)});
         });
}

void gather_compute_copy(Communicator& ranks, StateStore& states, int param, int64_t offset,
                         std::span<std::byte> out, std::string_view what) {
  gather(ranks, states, param, offset, out, dtype_bytes(states.planes(param).compute_dtype), what,
         [&](int64_t begin, std::span<std::byte> bytes) {
           states.read_compute_copy(param, begin, bytes);
         });
}

}  // namespace orlop
