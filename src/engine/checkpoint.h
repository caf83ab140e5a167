#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "comm/communicator.h"
#include "engine/state_files.h"
#include "model/param_layout.h"
#include "optim/grad_scaler.h"

namespace orlop {

// What a checkpoint holds beside masters and moments.
struct TrainingState {
  int64_t steps = 0;  // updates applied
  GradScalerState scaler;
  std::optional<bool> decoupled;  // AdamW, or Adam with L2; checkpoints of old do not tell
  std::string user_state;         // the caller's own, e.g. the position in the data
};

// Where the checkpoints of a run go.
struct CheckpointPlace {
  std::filesystem::path root;  // one folder that all ranks see
  size_t keep = 1;             // so many of the newest are kept
};

// Writes root/step-N/ with one file of states per rank (state_files.h), each by its rank, then the
// manifest. Nothing that exists is touched before the new folder is complete. All ranks call it.
// Returns the folder.
std::filesystem::path save_training(const CheckpointPlace& place, const ModelLayout& layout,
                                    StateStore& states, const TrainingState& training,
                                    const SaveOrder& order, Communicator& ranks);

// Reads this rank's part of such a folder, however many ranks have written it. Sizes, hashes, names
// and shapes are checked before the first state changes; a missing and an unknown tensor are
// errors, and so is a checkpoint of the other flavour of Adam than `decoupled` names, if it names
// one: weights alone are the same for both.
TrainingState load_training(const std::filesystem::path& folder, const ModelLayout& layout,
                            StateStore& states, Communicator& ranks, std::optional<bool> decoupled);

}  // namespace orlop
