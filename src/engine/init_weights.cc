#include <algorithm>
#include <cmath>
#include <numbers>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "cpu_adam/thread_share.h"
#include "engine/model_files.h"

namespace orlop {
namespace {

constexpr float kInitialDeviation = 0.02f;
constexpr int64_t kPieceElements = int64_t{1} << 16;

uint64_t mixed(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// A pair of independent normal numbers (Box & Muller 1958) from a counter.
void normal_pair(uint64_t key, float& first, float& second) {
  const uint64_t bits = mixed(key);
  const float u = (static_cast<float>(bits >> 40) + 1.0f) * 0x1p-24f;  // (0, 1]
  const float v = static_cast<float>((bits >> 16) & 0xffffffu) * 0x1p-24f;
  const float radius = kInitialDeviation * std::sqrt(-2.0f * std::log(u));
  first = radius * std::cos(2.0f * std::numbers::pi_v<float> * v);
  second = radius * std::sin(2.0f * std::numbers::pi_v<float> * v);
}

float constant_of(TensorRole role, bool& is_constant) {
  switch (role) {
    case TensorRole::kAttentionNormWeight:
    case TensorRole::kQueryNormWeight:
    case TensorRole::kKeyNormWeight:
    case TensorRole::kMlpNormWeight:
    case TensorRole::kFinalNormWeight:
      is_constant = true;
      return 1.0f;
    case TensorRole::kAttentionNormBias:
    case TensorRole::kQkvBias:
    case TensorRole::kAttentionOutBias:
    case TensorRole::kMlpNormBias:
    case TensorRole::kMlpInBias:
    case TensorRole::kMlpOutBias:
    case TensorRole::kFinalNormBias:
      is_constant = true;
      return 0.0f;
    default:
      is_constant = false;
      return 0.0f;
  }
}

// Normal numbers whose counters begin at `first`, which is even.
void fill_normal(uint64_t key, int64_t first, std::span<float> values) {
  for (size_t i = 0; i < values.size(); i += 2) {
    float unused = 0;
    normal_pair(key + (static_cast<uint64_t>(first) + i) * 0x9e3779b97f4a7c15u, values[i],
                i + 1 < values.size() ? values[i + 1] : unused);
  }
}

// Elements [first, first + values.size()) of a segment; `first` is even.
void fill_values(const Segment& segment, int64_t first, uint64_t key, int threads,
                 std::span<float> values) {
  bool is_constant = false;
  const float constant = constant_of(segment.role, is_constant);
  if (is_constant) {
    std::fill(values.begin(), values.end(), constant);
    return;
  }
  const auto count = static_cast<int64_t>(values.size());
  share_between_threads(ceil_div(count, kPieceElements), threads, [&](int64_t begin, int64_t end) {
    const int64_t from = begin * kPieceElements;
    const int64_t numel = std::min(end * kPieceElements, count) - from;
    fill_normal(key, first + from,
                values.subspan(static_cast<size_t>(from), static_cast<size_t>(numel)));
  });
}

}  // namespace

void init_weights(const ModelLayout& layout, uint64_t seed, int threads, StateStore& states) {
  states.clear();
  uint64_t stream = mixed(seed + 1);
  std::vector<float> values;
  for (size_t param = 0; param < layout.flat_params.size(); ++param) {
    for (const Segment& segment : layout.flat_params[param].segments) {
      stream = mixed(stream + 1);
      for (int64_t first = 0; first < segment.numel; first += threads * kPieceElements) {
        values.resize(
            static_cast<size_t>(std::min(threads * kPieceElements, segment.numel - first)));
        const ElementRange own = states.own_part(static_cast<int>(param), segment.offset + first,
                                                 static_cast<int64_t>(values.size()));
        if (own.numel == 0) continue;
        fill_values(segment, first, stream, threads, values);
        states.write(
            static_cast<int>(param), Plane::kMaster, own.begin,
            std::span(values).subspan(static_cast<size_t>(own.begin - segment.offset - first),
                                      static_cast<size_t>(own.numel)));
      }
    }
  }
  states.flush();
}

}  // namespace orlop
