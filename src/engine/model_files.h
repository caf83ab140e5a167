#pragma once

#include <filesystem>
#include <string>

#include "comm/communicator.h"
#include "engine/state_store.h"
#include "model/param_layout.h"

namespace orlop {

// Reads this rank's part of every weight of a Hugging Face folder into the masters, piece by piece;
// moments become zero. Throws Error(kInvalidData) that names file and tensor for a missing or an
// unknown tensor, a wrong shape or dtype, and for a NaN or Inf in a weight.
void load_weights(const std::filesystem::path& model_dir, const ModelLayout& layout,
                  StateStore& states);

// Random masters and zero moments: norms 1, biases 0, everything else normal(0, 0.02) as
// transformers initialises. The same values for any number of threads.
void init_weights(const ModelLayout& layout, uint64_t seed, int threads, StateStore& states);

// Writes a Hugging Face folder that transformers loads: weights in the compute dtype, sharded with
// an index above `max_shard_bytes`, and every other file of `model_dir` (config, tokenizer) byte
// for byte. All ranks call it: each brings its part, rank 0 writes.
void export_weights(const std::filesystem::path& model_dir, const std::filesystem::path& out_dir,
                    const ModelLayout& layout, StateStore& states, size_t max_shard_bytes,
                    Communicator& ranks);

}  // namespace orlop
