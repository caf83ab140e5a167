#include "model_runner.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "base/half.h"
#include "host/host_backend.h"
#include "model/workspace.h"

namespace orlop {
namespace {

constexpr size_t kArenaBytes = 24 * kMiB;
constexpr size_t kWorkspaceBudget = 64 * kMiB;  // of the operations
constexpr size_t kGuardBytes = 512;
constexpr int kNanByte = 0xff;  // every float, bf16 and fp16 made of it is a NaN
constexpr char kGuardByte = 0x5a;

void store(float value, void* to, int64_t index, DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      static_cast<uint16_t*>(to)[index] = float_to_bf16(value);
      break;
    case DType::kF16:
      static_cast<uint16_t*>(to)[index] = float_to_fp16(value);
      break;
    default:
      static_cast<float*>(to)[index] = value;
  }
}

template <typename T>
std::vector<T> read_as(const SafetensorsReader& reader, const std::string& name, DType dtype) {
  const TensorInfo& info = reader.at(name);
  check(info.dtype == dtype, ErrorCode::kInvalidData, "{} is {}", name, dtype_name(info.dtype));
  std::vector<T> values(static_cast<size_t>(info.numel()));
  reader.read(info, 0, std::as_writable_bytes(std::span(values)));
  return values;
}

}  // namespace

SortedRuns::SortedRuns(const std::vector<int32_t>& index) : rows(index.size()) {
  std::iota(rows.begin(), rows.end(), 0);
  const auto at = [&](int32_t row) { return index[static_cast<size_t>(row)]; };
  std::stable_sort(rows.begin(), rows.end(), [&](int32_t a, int32_t b) { return at(a) < at(b); });
  for (size_t i = 0; i < rows.size(); ++i) {
    if (i > 0 && at(rows[i]) == at(rows[i - 1])) continue;
    begin.push_back(static_cast<int32_t>(i));
    value.push_back(at(rows[i]));
  }
  begin.push_back(static_cast<int32_t>(rows.size()));
}

int64_t TestBatch::longest() const {
  int32_t longest = 0;
  for (size_t i = 1; i < cu_seqlens.size(); ++i) {
    longest = std::max(longest, cu_seqlens[i] - cu_seqlens[i - 1]);
  }
  return longest;
}

int64_t TestBatch::labelled() const {
  return std::count_if(labels.begin(), labels.end(), [](int32_t label) { return label >= 0; });
}

ModelRunner::ModelRunner(TransformerConfig config, DType dtype, bool reference_ops,
                         int64_t max_rows)
    : config_(std::move(config)),
      layout_(make_layout(config_)),
      dtype_(dtype),
      max_rows_(max_rows),
      backend_(make_host_backend({.device_bytes = kArenaBytes + kWorkspaceBudget,
                                  .threads = 1,
                                  .reference_ops = reference_ops})) {
  Workspace arena(backend_->allocate_arena(kArenaBytes));
  for (const FlatParamLayout& flat : layout_.flat_params) {
    params_.push_back(arena.take(flat.numel, dtype_));
    grads_.push_back(arena.take_floats(flat.numel));
    std::memset(params_.back(), 0, static_cast<size_t>(flat.numel) * dtype_bytes(dtype_));
  }
  const BatchShape shape{max_rows_, max_rows_};
  for (size_t b = 0; b < layout_.blocks.size(); ++b) {
    blocks_.push_back(make_block(config_, layout_, static_cast<int>(b), dtype_));
    activations_.push_back(arena.take(max_rows_ * config_.hidden, dtype_));
    for (const bool backward : {false, true}) {
      workspace_capacity_ = std::max(
          workspace_capacity_, blocks_.back()->workspace_bytes(backend_->ops(), shape, backward));
    }
  }
  grad_ = arena.take(max_rows_ * config_.hidden, dtype_);
  loss_ = arena.take_floats(max_rows_);
  scale_ = arena.take_floats(1);
  const std::vector<float> rope = rope_table(config_.rope, config_.max_positions);
  float* rope_on_device = arena.take_floats(static_cast<int64_t>(rope.size()));
  std::copy(rope.begin(), rope.end(), rope_on_device);
  rope_ = rope_on_device;
  workspace_ = static_cast<char*>(arena.take_bytes(workspace_capacity_ + kGuardBytes));
  check(arena.peak_bytes() <= kArenaBytes, ErrorCode::kDoesNotFit, "the test's arena is too small");
  zero_grads();
}

void ModelRunner::load(const SafetensorsReader& reader) {
  for (size_t f = 0; f < params_.size(); ++f) {
    for (const Segment& segment : layout_.flat_params[f].segments) {
      const std::vector<std::string> names = layout_.names_in_file(segment.name);
      const auto found = std::find_if(names.begin(), names.end(), [&](const std::string& name) {
        return reader.find(name) != nullptr;
      });
      check(found != names.end(), ErrorCode::kInvalidData, "no tensor {}", segment.name);
      const std::vector<float> values = read_floats(reader, *found);
      check(static_cast<int64_t>(values.size()) == segment.numel, ErrorCode::kInvalidData,
            "{} has {} elements, not {}", segment.name, values.size(), segment.numel);
      for (int64_t i = 0; i < segment.numel; ++i) {
        store(values[static_cast<size_t>(i)], params_[f], segment.offset + i, dtype_);
      }
    }
  }
}

void ModelRunner::call(size_t block, const BatchView& batch, void* input, void* output,
                       bool backward) {
  Block& target = *blocks_[block];
  Queue& queue = backend_->queue(QueueKind::kCompute);
  int64_t longest = 0;
  for (size_t i = 1; i < batch.cu_seqlens_host.size(); ++i) {
    longest = std::max<int64_t>(longest, batch.cu_seqlens_host[i] - batch.cu_seqlens_host[i - 1]);
  }
  const size_t promised = target.workspace_bytes(backend_->ops(), {batch.rows, longest}, backward);
  check(promised <= workspace_capacity_, ErrorCode::kInternal,
        "a smaller batch needs more workspace: {} > {}", promised, workspace_capacity_);
  std::memset(workspace_, kNanByte, promised);
  std::memset(workspace_ + promised, kGuardByte, kGuardBytes);

  std::vector<const void*> params;
  std::vector<float*> grads;
  for (const int flat : layout_.blocks[block].flat_params) {
    params.push_back(params_[static_cast<size_t>(flat)]);
    if (backward) grads.push_back(grads_[static_cast<size_t>(flat)]);
  }
  const BlockCall call{backend_->ops(), queue, batch, params, grads, workspace_, rope_};
  if (backward) {
    target.backward(call, input, output);
  } else {
    target.forward(call, input, output);
  }
  queue.synchronize();
  for (size_t i = 0; i < kGuardBytes; ++i) {
    check(workspace_[promised + i] == kGuardByte, ErrorCode::kInternal,
          "block {} wrote beyond its {} bytes of workspace", layout_.blocks[block].name, promised);
  }
}

std::vector<float> ModelRunner::forward(const TestBatch& batch) { return run(batch, 0, false); }

std::vector<float> ModelRunner::forward_backward(const TestBatch& batch, float scale) {
  return run(batch, scale, true);
}

std::vector<float> ModelRunner::run(const TestBatch& batch, float scale, bool backward) {
  check(batch.rows() <= max_rows_, ErrorCode::kUsage, "{} rows", batch.rows());
  const SortedRuns tokens(batch.tokens), positions(batch.positions);
  BatchView view;
  view.tokens = batch.tokens.data();
  view.labels = batch.labels.data();
  view.positions = batch.positions.data();
  view.cu_seqlens = batch.cu_seqlens.data();
  view.cu_seqlens_host = batch.cu_seqlens;
  view.rows = batch.rows();
  view.token_rows = tokens.rows.data();
  view.token_run_begin = tokens.begin.data();
  view.token_run_index = tokens.value.data();
  view.token_runs = tokens.runs();
  view.position_rows = positions.rows.data();
  view.position_run_begin = positions.begin.data();
  view.position_run_index = positions.value.data();
  view.position_runs = positions.runs();
  view.loss = loss_;
  view.scale = scale_;
  *scale_ = scale;

  const auto row_bytes = static_cast<size_t>(config_.hidden) * dtype_bytes(dtype_);
  const size_t activation_bytes = static_cast<size_t>(max_rows_) * row_bytes;
  const size_t head = blocks_.size() - 1;
  std::memset(loss_, kNanByte, static_cast<size_t>(max_rows_) * sizeof(float));
  for (size_t b = 0; b < head; ++b) {
    std::memset(activations_[b], kNanByte, activation_bytes);
    call(b, view, b == 0 ? nullptr : input_of(b), activations_[b], false);
  }
  if (backward) {
    std::memset(grad_, kNanByte, activation_bytes);
    for (size_t b = head; b > 0; --b) call(b, view, input_of(b), grad_, true);
    call(0, view, nullptr, grad_, true);
  } else {
    call(head, view, input_of(head), nullptr, false);
  }
  return {loss_, loss_ + batch.rows()};
}

void ModelRunner::zero_grads() {
  for (size_t f = 0; f < grads_.size(); ++f) {
    std::memset(grads_[f], 0, static_cast<size_t>(layout_.flat_params[f].numel) * sizeof(float));
  }
}

std::vector<float> ModelRunner::grad(const std::string& name) const {
  for (size_t f = 0; f < grads_.size(); ++f) {
    const Segment* segment = layout_.flat_params[f].find(name);
    if (segment == nullptr) continue;
    const float* begin = grads_[f] + segment->offset;
    return {begin, begin + segment->numel};
  }
  fail(ErrorCode::kUsage, "no segment {}", name);
}

std::vector<ModelRunner::Gap> ModelRunner::gaps() const {
  std::vector<Gap> gaps;
  for (size_t f = 0; f < layout_.flat_params.size(); ++f) {
    int64_t end = 0;
    for (const Segment& segment : layout_.flat_params[f].segments) {
      gaps.push_back({f, end, segment.offset});
      end = segment.offset + segment.numel;
    }
    gaps.push_back({f, end, layout_.flat_params[f].numel});
  }
  return gaps;
}

bool ModelRunner::gaps_are_zero() const {
  const auto all_zero = [](const void* base, int64_t begin, int64_t end, DType dtype) {
    const char* first = static_cast<const char*>(element(base, begin, dtype));
    const char* last = static_cast<const char*>(element(base, end, dtype));
    return std::all_of(first, last, [](char byte) { return byte == 0; });
  };
  for (const Gap& gap : gaps()) {
    if (!all_zero(params_[gap.flat], gap.begin, gap.end, dtype_)) return false;
    if (!all_zero(grads_[gap.flat], gap.begin, gap.end, DType::kF32)) return false;
  }
  return true;
}

std::vector<float> read_floats(const SafetensorsReader& reader, const std::string& name) {
  return read_as<float>(reader, name, DType::kF32);
}

std::vector<int32_t> read_ints(const SafetensorsReader& reader, const std::string& name) {
  return read_as<int32_t>(reader, name, DType::kI32);
}

}  // namespace orlop
