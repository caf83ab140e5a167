#include "engine/checkpoint.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "base/half.h"
#include "formats/manifest.h"
#include "formats/safetensors.h"
#include "formats/safetensors_writer.h"

namespace orlop {
namespace {

namespace fs = std::filesystem;

constexpr const char* kStatesFile = "optim/rank-0.safetensors";
constexpr int64_t kPieceElements = int64_t{1} << 18;
constexpr std::array<std::pair<Plane, const char*>, 3> kPlanes = {
    {{Plane::kMaster, ".master"}, {Plane::kExpAvg, ".exp_avg"}, {Plane::kExpAvgSq, ".exp_avg_sq"}}};

DType stored_dtype(Plane plane, DType moment_dtype) {
  return plane == Plane::kMaster ? DType::kF32 : moment_dtype;
}

// In the order in which `params` are written, which lets the file's hash run along.
std::vector<TensorSpec> state_specs(const ModelLayout& layout, const StateStore& states,
                                    const std::vector<int>& params) {
  std::vector<TensorSpec> specs;
  for (const int param : params) {
    const DType moments = states.planes(param).moment_dtype;
    for (const Segment& segment : layout.flat_params[static_cast<size_t>(param)].segments) {
      for (const auto& [plane, suffix] : kPlanes) {
        specs.push_back({segment.name + suffix, stored_dtype(plane, moments), segment.shape});
      }
    }
  }
  return specs;
}

// Hands one plane of one tensor to `use(first element, values)` in pieces.
template <typename Use>
void for_pieces(const Segment& segment, const Use& use) {
  std::vector<float> values;
  for (int64_t first = 0; first < segment.numel; first += kPieceElements) {
    values.resize(static_cast<size_t>(std::min(kPieceElements, segment.numel - first)));
    use(first, std::span<float>(values));
  }
}

void write_states(SafetensorsWriter& writer, const ModelLayout& layout, StateStore& states,
                  const SaveOrder& order) {
  std::vector<uint16_t> halves;
  for (const int index : order.params) {
    order.before(index);
    for (const Segment& segment : layout.flat_params[static_cast<size_t>(index)].segments) {
      for (const auto& [plane, suffix] : kPlanes) {
        const DType dtype = stored_dtype(plane, states.planes(index).moment_dtype);
        const std::string name = segment.name + suffix;
        for_pieces(segment, [&, which = plane](int64_t first, std::span<float> values) {
          states.read(index, which, segment.offset + first, values);
          std::span<const std::byte> bytes = std::as_bytes(values);
          if (dtype == DType::kBF16) {
            halves.resize(values.size());
            std::transform(values.begin(), values.end(), halves.begin(), float_to_bf16);
            bytes = std::as_bytes(std::span(halves));
          }
          writer.write(name, static_cast<size_t>(first) * dtype_bytes(dtype), bytes);
        });
      }
    }
    order.after(index);
  }
}

nlohmann::json to_json(const TrainingState& training) {
  const GradScalerState& scaler = training.scaler;
  return {{"steps", training.steps},
          {"scaler",
           {{"scale", scaler.scale},
            {"hysteresis_left", scaler.hysteresis_left},
            {"finite_steps", scaler.finite_steps},
            {"failures", scaler.failures},
            {"skipped_steps", scaler.skipped_steps}}},
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
    return training;
  } catch (const nlohmann::json::exception& error) {
    fail(ErrorCode::kInvalidData, "'{}': the training state is damaged: {}",
         (folder / kManifestName).string(), error.what());
  }
}

void check_names(const SafetensorsReader& reader, const std::vector<TensorSpec>& specs,
                 const fs::path& file) {
  for (const TensorSpec& spec : specs) {
    const TensorInfo& tensor = reader.at(spec.name);
    check(tensor.shape == spec.shape, ErrorCode::kInvalidData,
          "'{}': '{}' has shape [{}], the model asks for [{}]", file.string(), spec.name,
          fmt::join(tensor.shape, ", "), fmt::join(spec.shape, ", "));
    check(tensor.dtype == DType::kF32 || tensor.dtype == DType::kBF16, ErrorCode::kInvalidData,
          "'{}': '{}' is {}; states are F32 or BF16", file.string(), spec.name,
          dtype_name(tensor.dtype));
  }
  check(reader.tensors().size() == specs.size(), ErrorCode::kInvalidData,
        "'{}' holds {} tensors, the model has {} states: it belongs to another model",
        file.string(), reader.tensors().size(), specs.size());
}

void read_states(const SafetensorsReader& reader, const ModelLayout& layout, StateStore& states) {
  std::vector<uint16_t> halves;
  for (size_t param = 0; param < layout.flat_params.size(); ++param) {
    for (const Segment& segment : layout.flat_params[param].segments) {
      for (const auto& [plane, suffix] : kPlanes) {
        const TensorInfo& tensor = reader.at(segment.name + suffix);
        for_pieces(segment, [&, which = plane](int64_t first, std::span<float> values) {
          const size_t offset = static_cast<size_t>(first) * dtype_bytes(tensor.dtype);
          if (tensor.dtype == DType::kBF16) {
            halves.resize(values.size());
            reader.read(tensor, offset, std::as_writable_bytes(std::span(halves)));
            std::transform(halves.begin(), halves.end(), values.begin(), bf16_to_float);
          } else {
            reader.read(tensor, offset, std::as_writable_bytes(values));
          }
          states.write(static_cast<int>(param), which, segment.offset + first, values);
        });
      }
    }
  }
}

}  // namespace

fs::path save_training(const fs::path& root, size_t keep, const ModelLayout& layout,
                       StateStore& states, const TrainingState& training, const SaveOrder& order) {
  remove_leftovers(root);
  const fs::path folder = begin_checkpoint(root, training.steps);
  std::error_code error;
  fs::create_directories((folder / kStatesFile).parent_path(), error);
  check(!error, ErrorCode::kIo, "checkpoint: cannot make '{}': {}",
        (folder / kStatesFile).parent_path().string(), error.message());
  SafetensorsWriter writer(folder / kStatesFile, state_specs(layout, states, order.params));
  write_states(writer, layout, states, order);
  const WrittenFile written = writer.finish();
  Manifest manifest;
  manifest.step = training.steps;
  manifest.state = to_json(training);
  manifest.files.push_back({kStatesFile, written.bytes, written.xxh3});
  const fs::path complete = commit_checkpoint(root, manifest);
  prune_checkpoints(root, keep);
  return complete;
}

TrainingState load_training(const fs::path& folder, const ModelLayout& layout, StateStore& states) {
  const Manifest manifest = read_checkpoint(folder, VerifyHashes::kYes);
  const TrainingState training = from_json(manifest.state, folder);
  const fs::path file = folder / kStatesFile;
  const SafetensorsReader reader(file);
  std::vector<int> params(layout.flat_params.size());
  std::iota(params.begin(), params.end(), 0);
  check_names(reader, state_specs(layout, states, params), file);
  read_states(reader, layout, states);
  return training;
}

}  // namespace orlop
