#pragma once

#include "host/kernels.h"

namespace orlop::host {

// Attention of one head, query by query, in fp64: the oracle of attention.inl.h. T:
// element_types.h.
template <typename T>
void reference_attention_forward(const AttentionHead& head, int64_t block, float* scratch);
template <typename T>
void reference_attention_backward(const AttentionHeadBackward& head, float* scratch);

int64_t reference_attention_scratch(int64_t head_dim, int64_t max_length, bool backward);

}  // namespace orlop::host
