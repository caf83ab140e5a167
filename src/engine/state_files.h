#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/state_store.h"
#include "formats/manifest.h"
#include "formats/safetensors.h"
#include "model/param_layout.h"

namespace orlop {

// The states in a checkpoint: one file per rank, optim/rank-R.safetensors, with what that rank has
// of `<tensor>.master` (fp32), `<tensor>.exp_avg` and `<tensor>.exp_avg_sq`. A tensor that one rank
// has whole keeps its shape; else each file holds a slice of it, flat, and the slices in the order
// of the ranks are the tensor. No padding is stored, so that any number of ranks reads them.

// Below the checkpoint's folder.
std::string state_file_name(int rank);

// Writes this rank's file into `folder` and returns its manifest entry.
ManifestFile write_state_file(const std::filesystem::path& folder, int rank,
                              const ModelLayout& layout, StateStore& states);

// Reads the files of any number of ranks.
class StateFiles {
 public:
  // Opens the state files that the manifest lists and checks their tensors against the model.
  // Throws Error(kInvalidData) that names file, tensor and numbers: a missing and an unknown tensor
  // are errors.
  StateFiles(const std::filesystem::path& folder, const Manifest& manifest,
             const ModelLayout& layout);

  // Reads this rank's part of everything.
  void read(const ModelLayout& layout, StateStore& states) const;

 private:
  struct Slice {
    const SafetensorsReader* reader = nullptr;
    const TensorInfo* tensor = nullptr;
    int64_t begin = 0;  // in the tensor
  };

  void check_tensor(const std::string& name, const Segment& segment,
                    const std::filesystem::path& folder) const;
  void read_plane(const std::vector<Slice>& slices, int param, const Segment& segment, Plane plane,
                  StateStore& states) const;

  std::vector<std::unique_ptr<SafetensorsReader>> readers_;  // in the order of the ranks
  std::map<std::string, std::vector<Slice>> tensors_;
};

}  // namespace orlop
