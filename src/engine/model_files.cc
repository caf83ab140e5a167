#include "engine/model_files.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <optional>
#include <set>

#include "base/check.h"
#include "base/half.h"
#include "engine/gather_states.h"
#include "engine/ranks.h"
#include "formats/file_io.h"
#include "formats/safetensors.h"
#include "formats/safetensors_writer.h"

namespace orlop {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kPieceElements = int64_t{1} << 18;

std::string shape_text(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

const TensorInfo& find_tensor(const SafetensorsReader& reader, const ModelLayout& layout,
                              const Segment& segment, const fs::path& model_dir) {
  for (const std::string& name : layout.names_in_file(segment.name)) {
    if (const TensorInfo* tensor = reader.find(name)) {
      check(tensor->shape == segment.shape, ErrorCode::kInvalidData,
            "'{}': tensor '{}' has shape {}, config.json asks for {}",
            reader.files()[tensor->file_index].string(), name, shape_text(tensor->shape),
            shape_text(segment.shape));
      return *tensor;
    }
  }
  fail(ErrorCode::kInvalidData, "'{}': tensor '{}' is missing", model_dir.string(), segment.name);
}

void to_floats(const TensorInfo& tensor, const std::byte* bytes, std::span<float> values,
               const std::string& file) {
  switch (tensor.dtype) {
    case DType::kF32:
      std::copy_n(reinterpret_cast<const float*>(bytes), values.size(), values.begin());
      return;
    case DType::kBF16:
      std::transform(reinterpret_cast<const uint16_t*>(bytes),
                     reinterpret_cast<const uint16_t*>(bytes) + values.size(), values.begin(),
                     bf16_to_float);
      return;
    case DType::kF16:
      std::transform(reinterpret_cast<const uint16_t*>(bytes),
                     reinterpret_cast<const uint16_t*>(bytes) + values.size(), values.begin(),
                     fp16_to_float);
      return;
    default:
      fail(ErrorCode::kInvalidData, "'{}': tensor '{}' is {}; weights are F32, BF16 or F16", file,
           tensor.name, dtype_name(tensor.dtype));
  }
}

// Reads a part of one tensor in pieces and hands each to `use(first element, values)`.
template <typename Use>
void read_pieces(const SafetensorsReader& reader, const TensorInfo& tensor,
                 const ElementRange& part, const Use& use) {
  const std::string file = reader.files()[tensor.file_index].string();
  const int64_t end = part.begin + part.numel;
  const size_t element = dtype_bytes(tensor.dtype);
  std::vector<std::byte> bytes;
  std::vector<float> values;
  for (int64_t first = part.begin; first < end; first += kPieceElements) {
    const size_t count = static_cast<size_t>(std::min(kPieceElements, end - first));
    bytes.resize(count * element);
    values.resize(count);
    reader.read(tensor, static_cast<size_t>(first) * element, bytes);
    to_floats(tensor, bytes.data(), values, file);
    use(first, std::span<const float>(values));
  }
}

void check_no_unknown_tensor(const SafetensorsReader& reader, const ModelLayout& layout) {
  std::set<std::string> known;
  for (const FlatParamLayout& flat : layout.flat_params) {
    for (const Segment& segment : flat.segments) {
      for (const std::string& name : layout.names_in_file(segment.name)) known.insert(name);
    }
  }
  for (const TensorInfo& tensor : reader.tensors()) {
    check(known.contains(tensor.name) || layout.is_passed_over(tensor.name),
          ErrorCode::kInvalidData,
          "'{}': tensor '{}' is not part of the model that config.json describes",
          reader.files()[tensor.file_index].string(), tensor.name);
  }
}

// Everything of a model folder but its weights, byte for byte.
void copy_other_files(const fs::path& model_dir, const fs::path& out_dir) {
  for (const fs::path& path : list_folder(model_dir)) {
    const std::string extension = path.extension();
    const std::string name = path.filename();
    const bool is_weights = extension == ".safetensors" || extension == ".bin" ||
                            extension == ".pt" || extension == ".gguf" ||
                            name == kSafetensorsIndexName;
    std::error_code error;
    if (!fs::is_regular_file(path, error) || is_weights) continue;
    fs::copy_file(path, out_dir / name, fs::copy_options::overwrite_existing, error);
    check(!error, ErrorCode::kIo, "export: cannot copy '{}' to '{}': {}", path.string(),
          out_dir.string(), error.message());
  }
}

void begin_export(const fs::path& model_dir, const fs::path& out_dir) {
  check(!fs::exists(out_dir) || !fs::equivalent(model_dir, out_dir), ErrorCode::kUsage,
        "export: '{}' is the folder the model was read from; choose another", out_dir.string());
  std::error_code error;
  fs::create_directories(out_dir, error);
  check(!error, ErrorCode::kIo, "export: cannot make '{}': {}", out_dir.string(), error.message());
}

}  // namespace

void load_weights(const fs::path& model_dir, const ModelLayout& layout, StateStore& states) {
  const SafetensorsReader reader(model_dir);
  check_no_unknown_tensor(reader, layout);
  states.clear();
  for (size_t param = 0; param < layout.flat_params.size(); ++param) {
    for (const Segment& segment : layout.flat_params[param].segments) {
      const TensorInfo& tensor = find_tensor(reader, layout, segment, model_dir);
      const ElementRange own =
          states.own_part(static_cast<int>(param), segment.offset, segment.numel);
      read_pieces(reader, tensor, {own.begin - segment.offset, own.numel},
                  [&](int64_t first, std::span<const float> values) {
                    const auto bad = std::find_if(values.begin(), values.end(),
                                                  [](float v) { return !std::isfinite(v); });
                    check(bad == values.end(), ErrorCode::kInvalidData,
                          "'{}': tensor '{}' is {} at element {}",
                          reader.files()[tensor.file_index].string(), tensor.name,
                          bad == values.end() ? 0.0f : *bad, first + (bad - values.begin()));
                    states.write(static_cast<int>(param), Plane::kMaster, segment.offset + first,
                                 values);
                  });
    }
  }
  states.flush();
}

namespace {

std::vector<TensorSpec> weight_specs(const ModelLayout& layout, const StateStore& states) {
  std::vector<TensorSpec> specs;
  for (size_t param = 0; param < layout.flat_params.size(); ++param) {
    for (const Segment& segment : layout.flat_params[param].segments) {
      specs.push_back(
          {segment.name, states.planes(static_cast<int>(param)).compute_dtype, segment.shape});
    }
  }
  return specs;
}

// Hands every weight to `write(name, first byte, bytes)`, piece by piece. Every rank brings what it
// has of a piece, and the first failure does not keep the others waiting: it is thrown at the end.
template <typename Write>
void gather_weights(Communicator& ranks, const ModelLayout& layout, StateStore& states,
                    const Write& write) {
  std::vector<std::byte> piece;
  std::exception_ptr error;
  for (size_t param = 0; param < layout.flat_params.size(); ++param) {
    const int index = static_cast<int>(param);
    const size_t element = dtype_bytes(states.planes(index).compute_dtype);
    for (const Segment& segment : layout.flat_params[param].segments) {
      for (int64_t first = 0; first < segment.numel; first += kPieceElements) {
        piece.resize(static_cast<size_t>(std::min(kPieceElements, segment.numel - first)) *
                     element);
        gather_compute_copy(ranks, states, index, segment.offset + first, piece,
                            "export " + segment.name);
        if (error) continue;
        try {
          write(segment.name, static_cast<size_t>(first) * element, piece);
        } catch (const Error&) {
          error = std::current_exception();
          if (ranks.world_size() == 1) throw;
        }
      }
    }
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace

void export_weights(const fs::path& model_dir, const fs::path& out_dir, const ModelLayout& layout,
                    StateStore& states, size_t max_shard_bytes, Communicator& ranks) {
  const bool writes = ranks.rank() == 0;
  std::optional<ShardedSafetensorsWriter> writer;
  on_all_ranks(ranks, "export", [&] {
    if (!writes) return;
    begin_export(model_dir, out_dir);
    writer.emplace(out_dir, weight_specs(layout, states), max_shard_bytes,
                   SafetensorsMetadata{{"format", "pt"}});
  });
  on_all_ranks(ranks, "export", [&] {
    gather_weights(ranks, layout, states,
                   [&](const std::string& name, size_t first, std::span<const std::byte> bytes) {
                     if (writes) writer->write(name, first, bytes);
                   });
    if (!writes) return;
    writer->finish();
    copy_other_files(model_dir, out_dir);
  });
}

}  // namespace orlop
