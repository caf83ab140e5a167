#pragma once

#include <filesystem>
#include <string>

#include "comm/communicator.h"
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

// Writes root/step-N/ with one file of states per rank (state_files.h), each by its rank, then the
// manifest; keeps the newest `keep` checkpoints. Nothing that exists is touched before the new
// folder is complete. All ranks call it, with one `root` that all of them see. Returns the folder.
std::filesystem::path save_training(const std::filesystem::path& root, size_t keep,
                                    const ModelLayout& layout, StateStore& states,
                                    const TrainingState& training, Communicator& ranks);

// Reads this rank's part of such a folder, however many ranks have written it. Sizes, hashes, names
// and shapes are checked before the first state changes; a missing and an unknown tensor are
// errors.
TrainingState load_training(const std::filesystem::path& folder, const ModelLayout& layout,
                            StateStore& states, Communicator& ranks);

}  // namespace orlop
