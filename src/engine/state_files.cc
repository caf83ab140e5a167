#include "engine/state_files.h"

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "base/check.h"
#include "base/half.h"
#include "base/numbered_name.h"
#include "formats/safetensors_writer.h"

namespace orlop {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "optim/rank-";
constexpr std::string_view kSuffix = ".safetensors";
constexpr int64_t kPieceElements = int64_t{1} << 18;
constexpr std::array<std::pair<Plane, const char*>, 3> kPlanes = {
    {{Plane::kMaster, ".master"}, {Plane::kExpAvg, ".exp_avg"}, {Plane::kExpAvgSq, ".exp_avg_sq"}}};

DType stored_dtype(Plane plane, DType moment_dtype) {
  return plane == Plane::kMaster ? DType::kF32 : moment_dtype;
}

// Hands [begin, begin + numel) to `use(first element, values)` in pieces.
template <typename Use>
void for_pieces(const ElementRange& range, const Use& use) {
  std::vector<float> values;
  const int64_t end = range.begin + range.numel;
  for (int64_t first = range.begin; first < end; first += kPieceElements) {
    values.resize(static_cast<size_t>(std::min(kPieceElements, end - first)));
    use(first, std::span<float>(values));
  }
}

// The parts of a range of which one plane after the other is moved: the whole, as planes lie in the
// file, or, where states come from a drive, what lies in one chunk, so that each chunk comes once.
std::vector<ElementRange> parts_of(const StateStore& states, int param, const ElementRange& range) {
  std::vector<ElementRange> parts;
  const int64_t end = range.begin + range.numel;
  for (int64_t begin = range.begin; begin < end; begin += parts.back().numel) {
    parts.push_back({begin, std::min(end - begin, states.numel_at_once(param, begin))});
  }
  return parts;
}

// In the order in which `params` are written, which lets the file's hash run along.
std::vector<TensorSpec> own_specs(const ModelLayout& layout, const StateStore& states,
                                  const std::vector<int>& params) {
  std::vector<TensorSpec> specs;
  for (const int param : params) {
    const DType moments = states.planes(param).moment_dtype;
    for (const Segment& segment : layout.flat_params[static_cast<size_t>(param)].segments) {
      const ElementRange own = states.own_part(param, segment.offset, segment.numel);
      if (own.numel == 0) continue;
      const std::vector<int64_t> shape =
          own.numel == segment.numel ? segment.shape : std::vector<int64_t>{own.numel};
      for (const auto& [plane, suffix] : kPlanes) {
        specs.push_back({segment.name + suffix, stored_dtype(plane, moments), shape});
      }
    }
  }
  return specs;
}

// A part of one plane of a tensor.
struct PlanePiece {
  int param = -1;
  const Segment& segment;
  std::pair<Plane, const char*> plane;
  ElementRange range;  // of the FlatParam
};

void write_plane(SafetensorsWriter& writer, StateStore& states, const PlanePiece& piece) {
  const Segment& segment = piece.segment;
  const DType dtype = stored_dtype(piece.plane.first, states.planes(piece.param).moment_dtype);
  const std::string name = segment.name + piece.plane.second;
  const ElementRange own = states.own_part(piece.param, segment.offset, segment.numel);
  std::vector<uint16_t> halves;
  for_pieces(piece.range, [&](int64_t first, std::span<float> values) {
    states.read(piece.param, piece.plane.first, first, values);
    std::span<const std::byte> bytes = std::as_bytes(values);
    if (dtype == DType::kBF16) {
      halves.resize(values.size());
      std::transform(values.begin(), values.end(), halves.begin(), float_to_bf16);
      bytes = std::as_bytes(std::span(halves));
    }
    writer.write(name, static_cast<size_t>(first - own.begin) * dtype_bytes(dtype), bytes);
  });
}

// The state files of a checkpoint in the order of their ranks.
std::vector<fs::path> state_files(const fs::path& folder, const Manifest& manifest) {
  std::map<int, fs::path> by_rank;
  for (const ManifestFile& file : manifest.files) {
    if (const int rank = number_in(file.path, kPrefix, kSuffix); rank >= 0)
      by_rank[rank] = folder / file.path;
  }
  std::vector<fs::path> files;
  for (const auto& [rank, file] : by_rank) {
    check(rank == static_cast<int>(files.size()), ErrorCode::kInvalidData,
          "'{}': the states of rank {} are missing; the next file is '{}'", folder.string(),
          files.size(), file.string());
    files.push_back(file);
  }
  check(!files.empty(), ErrorCode::kInvalidData, "'{}' holds no states", folder.string());
  return files;
}

// "\n  missing (12): a, b, c, ..."
std::string listed(const char* what, const std::vector<std::string>& names) {
  if (names.empty()) return "";
  const size_t shown = std::min<size_t>(names.size(), 6);
  return fmt::format(
      "\n  {} ({}): {}{}", what, names.size(),
      fmt::join(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(shown), ", "),
      shown < names.size() ? ", ..." : "");
}

}  // namespace

std::string state_file_name(int rank) { return fmt::format("{}{}{}", kPrefix, rank, kSuffix); }

void make_state_folder(const fs::path& folder) {
  const fs::path path = (folder / state_file_name(0)).parent_path();
  std::error_code error;
  fs::create_directories(path, error);
  check(!error, ErrorCode::kIo, "checkpoint: cannot make '{}': {}", path.string(), error.message());
}

ManifestFile write_state_file(const fs::path& folder, int rank, const ModelLayout& layout,
                              StateStore& states, const SaveOrder& order) {
  const std::string name = state_file_name(rank);
  SafetensorsWriter writer(folder / name, own_specs(layout, states, order.params));
  for (const int param : order.params) {
    order.before(param);
    for (const Segment& segment : layout.flat_params[static_cast<size_t>(param)].segments) {
      const ElementRange own = states.own_part(param, segment.offset, segment.numel);
      for (const ElementRange& part : parts_of(states, param, own)) {
        for (const auto& plane : kPlanes)
          write_plane(writer, states, {param, segment, plane, part});
      }
    }
    order.after(param);
  }
  const WrittenFile written = writer.finish();
  return {name, written.bytes, written.xxh3};
}

StateFiles::StateFiles(const fs::path& folder, const Manifest& manifest,
                       const ModelLayout& layout) {
  for (const fs::path& file : state_files(folder, manifest)) {
    readers_.push_back(std::make_unique<SafetensorsReader>(file));
    for (const TensorInfo& tensor : readers_.back()->tensors()) {
      std::vector<Slice>& slices = tensors_[tensor.name];
      const int64_t begin =
          slices.empty() ? 0 : slices.back().begin + slices.back().tensor->numel();
      slices.push_back({readers_.back().get(), &tensor, begin});
    }
  }
  Differences differences;
  std::set<std::string> known;
  for (const FlatParamLayout& flat : layout.flat_params) {
    for (const Segment& segment : flat.segments) {
      for (const auto& [plane, suffix] : kPlanes) {
        compare(segment.name + suffix, segment, differences);
        known.insert(segment.name + suffix);
      }
    }
  }
  for (const auto& [name, slices] : tensors_) {
    if (!known.contains(name)) differences.unexpected.push_back(name);
  }
  const auto& [missing, reshaped, unexpected] = differences;
  check(missing.empty() && reshaped.empty() && unexpected.empty(), ErrorCode::kInvalidData,
        "'{}' belongs to another model:{}{}{}", folder.string(), listed("missing", missing),
        listed("of another shape", reshaped), listed("unexpected", unexpected));
}

void StateFiles::compare(const std::string& name, const Segment& segment,
                         Differences& differences) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    differences.missing.push_back(name);
    return;
  }
  int64_t numel = 0;
  for (const Slice& slice : found->second) {
    const TensorInfo& tensor = *slice.tensor;
    check(tensor.dtype == DType::kF32 || tensor.dtype == DType::kBF16, ErrorCode::kInvalidData,
          "'{}': '{}' is {}; states are F32 or BF16", slice.reader->files().front().string(), name,
          dtype_name(tensor.dtype));
    const bool is_whole = tensor.numel() == segment.numel;
    if (!(is_whole ? tensor.shape == segment.shape : tensor.shape.size() == 1)) {
      differences.reshaped.push_back(fmt::format("{} [{}] instead of [{}]", name,
                                                 fmt::join(tensor.shape, ", "),
                                                 fmt::join(segment.shape, ", ")));
      return;
    }
    numel += tensor.numel();
  }
  if (numel != segment.numel) {
    differences.reshaped.push_back(fmt::format("{} with {} elements in {} files instead of {}",
                                               name, numel, readers_.size(), segment.numel));
  }
}

void StateFiles::read(const ModelLayout& layout, StateStore& states) const {
  for (size_t param = 0; param < layout.flat_params.size(); ++param) {
    const int index = static_cast<int>(param);
    for (const Segment& segment : layout.flat_params[param].segments) {
      const ElementRange own = states.own_part(index, segment.offset, segment.numel);
      for (const ElementRange& part : parts_of(states, index, own)) {
        for (const auto& [plane, suffix] : kPlanes) {
          if (!states.planes(index).takes(plane)) continue;
          read_plane(tensors_.at(segment.name + suffix), {index, segment.offset, plane, part},
                     states);
        }
      }
    }
  }
  states.flush();
}

void StateFiles::read_plane(const std::vector<Slice>& slices, const Target& target,
                            StateStore& states) const {
  std::vector<uint16_t> halves;
  for (const Slice& slice : slices) {
    const TensorInfo& tensor = *slice.tensor;
    const ElementRange part =
        intersect({target.range.begin - target.segment_offset, target.range.numel},
                  {slice.begin, tensor.numel()});
    for_pieces(part, [&](int64_t first, std::span<float> values) {
      const size_t offset = static_cast<size_t>(first - slice.begin) * dtype_bytes(tensor.dtype);
      if (tensor.dtype == DType::kBF16) {
        halves.resize(values.size());
        slice.reader->read(tensor, offset, std::as_writable_bytes(std::span(halves)));
        std::transform(halves.begin(), halves.end(), values.begin(), bf16_to_float);
      } else {
        slice.reader->read(tensor, offset, std::as_writable_bytes(values));
      }
      states.write(target.param, target.plane, target.segment_offset + first, values);
    });
  }
}

}  // namespace orlop
