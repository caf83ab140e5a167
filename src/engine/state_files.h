#pragma once

#include <filesystem>
#include <functional>
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

// How a save goes through the states.
struct SaveOrder {
  std::vector<int> params;                // every FlatParam once
  std::function<void(int param)> before;  // called before the first read of a FlatParam
  std::function<void(int param)> after;   // and when all of it is written
};

// The folder for the files, below the checkpoint's.
void make_state_folder(const std::filesystem::path& folder);

// Writes this rank's file and returns its manifest entry.
ManifestFile write_state_file(const std::filesystem::path& folder, int rank,
                              const ModelLayout& layout, StateStore& states,
                              const SaveOrder& order);

// Reads the files of any number of ranks.
class StateFiles {
 public:
  // Opens the state files that the manifest lists and checks their tensors against the model.
  // Throws Error(kInvalidData) that names the folder and every tensor that is missing, unexpected
  // or of another shape.
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

  // A part of one plane of a tensor.
  struct Target {
    int param = -1;
    int64_t segment_offset = 0;  // of the tensor in the FlatParam
    Plane plane = Plane::kMaster;
    ElementRange range;  // of the FlatParam
  };

  // What the files hold other than the model asks for, by tensor.
  struct Differences {
    std::vector<std::string> missing;
    std::vector<std::string> reshaped;
    std::vector<std::string> unexpected;
  };

  void compare(const std::string& name, const Segment& segment, Differences& differences) const;
  void read_plane(const std::vector<Slice>& slices, const Target& target, StateStore& states) const;

  std::vector<std::unique_ptr<SafetensorsReader>> readers_;  // in the order of the ranks
  std::map<std::string, std::vector<Slice>> tensors_;
};

}  // namespace orlop
