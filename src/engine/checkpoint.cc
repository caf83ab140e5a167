#include "engine/checkpoint.h"

#include <algorithm>
#include <optional>

#include "base/check.h"
#include "engine/ranks.h"
#include "engine/state_files.h"
#include "formats/manifest.h"

namespace orlop {
namespace {

namespace fs = std::filesystem;

nlohmann::json to_json(const TrainingState& training) {
  const GradScalerState& scaler = training.scaler;
  return {{"steps", training.steps},
          {"scaler",
           {{"scale", scaler.scale},
            {"hysteresis_left", scaler.hysteresis_left},
            {"finite_steps", scaler.finite_steps},
            {"failures", scaler.failures},
            {"skipped_steps", scaler.skipped_steps}}},
          {"optimizer", training.decoupled.value_or(true) ? "adamw" : "adam"},
          {"user_state", training.user_state}};
}

TrainingState from_json(const nlohmann::json& state, const fs::path& folder) {
  try {
    const nlohmann::json& scaler = state.at("scaler");
    TrainingState training;
    state.at("steps").get_to(training.steps);
    scaler.at("scale").get_to(training.scaler.scale);
    scaler.at("hysteresis_left").get_to(training.scaler.hysteresis_left);
    scaler.at("finite_steps").get_to(training.scaler.finite_steps);
    scaler.at("failures").get_to(training.scaler.failures);
    scaler.at("skipped_steps").get_to(training.scaler.skipped_steps);
    state.at("user_state").get_to(training.user_state);
    if (state.contains("optimizer")) training.decoupled = state["optimizer"] == "adamw";
    return training;
  } catch (const nlohmann::json::exception& error) {
    fail(ErrorCode::kInvalidData, "'{}': the training state is damaged: {}",
         (folder / kManifestName).string(), error.what());
  }
}

// What every rank has written, in the order of the ranks.
std::vector<ManifestFile> gather_files(Communicator& ranks, const ManifestFile& own) {
  struct Entry {
    size_t bytes;
    uint64_t xxh3;
  };
  const Entry entry{own.bytes, own.xxh3};
  std::vector<Entry> entries(static_cast<size_t>(ranks.world_size()));
  ranks.all_gather_values(std::as_bytes(std::span(&entry, 1)),
                          std::as_writable_bytes(std::span(entries)), "checkpoint files");
  std::vector<ManifestFile> files;
  for (size_t rank = 0; rank < entries.size(); ++rank) {
    files.push_back(
        {state_file_name(static_cast<int>(rank)), entries[rank].bytes, entries[rank].xxh3});
  }
  return files;
}

}  // namespace

fs::path save_training(const CheckpointPlace& place, const ModelLayout& layout, StateStore& states,
                       const TrainingState& training, const SaveOrder& order, Communicator& ranks) {
  const fs::path unfinished = unfinished_checkpoint(place.root, training.steps);
  on_all_ranks(ranks, "checkpoint, begin", [&] {
    if (ranks.rank() != 0) return;
    remove_leftovers(place.root);
    begin_checkpoint(place.root, training.steps);
    make_state_folder(unfinished);
  });
  ManifestFile own;
  on_all_ranks(ranks, "checkpoint, states",
               [&] { own = write_state_file(unfinished, ranks.rank(), layout, states, order); });
  Manifest manifest;
  manifest.step = training.steps;
  manifest.state = to_json(training);
  manifest.files = gather_files(ranks, own);
  on_all_ranks(ranks, "checkpoint, manifest", [&] {
    if (ranks.rank() != 0) return;
    commit_checkpoint(place.root, manifest);
    prune_checkpoints(place.root, place.keep);
  });
  return checkpoint_folder(place.root, training.steps);
}

TrainingState load_training(const fs::path& folder, const ModelLayout& layout, StateStore& states,
                            Communicator& ranks, std::optional<bool> decoupled) {
  TrainingState training;
  std::optional<StateFiles> files;
  on_all_ranks(ranks, "checkpoint, check", [&] {
    const Manifest manifest = read_checkpoint(folder, VerifyHashes::kNo);
    for (size_t i = 0; i < manifest.files.size(); ++i) {  // the ranks share the work
      if (i % static_cast<size_t>(ranks.world_size()) != static_cast<size_t>(ranks.rank()))
        continue;
      verify_hash(folder, manifest.files[i]);
    }
    training = from_json(manifest.state, folder);
    check(training.steps == manifest.step, ErrorCode::kInvalidData,
          "'{}': the training state has {} steps, the checkpoint is of step {}",
          (folder / kManifestName).string(), training.steps, manifest.step);
    check(!decoupled || training.decoupled.value_or(*decoupled) == *decoupled, ErrorCode::kUsage,
          "'{}' was written by {}, this run uses {}: their moments are not the same; set "
          "optimizer.decoupled (--optim) to the one that wrote it",
          folder.string(), decoupled == true ? "Adam with L2" : "AdamW",
          decoupled == true ? "AdamW" : "Adam with L2");
    files.emplace(folder, manifest, layout);
  });
  files->read(layout, states);
  return training;
}

}  // namespace orlop
