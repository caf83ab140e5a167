#pragma once

#include "comm/communicator.h"
#include "engine/state_store.h"

namespace orlop {

// Elements [offset, offset + values.size()) of one plane of a FlatParam, from the ranks that have
// them. All ranks call it alike and all get the values; `what` says in errors what they are for.
void gather_plane(Communicator& ranks, StateStore& states, int param, Plane plane, int64_t offset,
                  std::span<float> values, std::string_view what);

// The same of the compute copy, in the compute dtype.
void gather_compute_copy(Communicator& ranks, StateStore& states, int param, int64_t offset,
                         std::span<std::byte> out, std::string_view what);

}  // namespace orlop
