#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "engine/state_store.h"
#include "model/param_layout.h"
#include "optim/grad_scaler.h"

namespace orlop {

// What a checkpoint holds beside masters and moments.
struct TrainingState {
  int64_t steps = 0;  // updates applied
  GradScalerState scaler;
  std::string user_state;  // the caller's own, e.g. the position in the data
};

// How a save goes through the states.
struct SaveOrder {
  std::vector<int> params;                // every FlatParam once
  std::function<void(int param)> before;  // called before the first read of a FlatParam
  std::function<void(int param)> after;   // and when all of it is written
};

// Writes root/step-N/optim/rank-0.safetensors with `<tensor>.master` (fp32), `.exp_avg` and
// `.exp_avg_sq` of every tensor, in the tensor's shape, then the manifest; keeps the newest `keep`
// checkpoints. Nothing that exists is touched before the new folder is complete. Returns the
// folder.
std::filesystem::path save_training(const std::filesystem::path& root, size_t keep,
                                    const ModelLayout& layout, StateStore& states,
                                    const TrainingState& training, const SaveOrder& order);

// Reads such a folder. Sizes, hashes, names and shapes are checked before the first state changes;
// a missing and an unknown tensor are errors.
TrainingState load_training(const std::filesystem::path& folder, const ModelLayout& layout,
                            StateStore& states);

}  // namespace orlop
