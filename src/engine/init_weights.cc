#include <algorithm>
#include <cmath>
#include <numbers>
#include <thread>
#include <vector>

#include "base/bytes.h"
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

void init_piece(const StatePlanes& planes, std::byte* base, const Segment& segment, int64_t first,
                uint64_t key) {
  std::vector<float> values(static_cast<size_t>(std::min(kPieceElements, segment.numel - first)) + 1);
  bool is_constant = false;
  const float constant = constant_of(segment.role, is_constant);
  for (size_t i = 0; i + 1 < values.size(); i += 2) {
    if (is_constant) {
      values[i] = values[i + 1] = constant;
    } else {
      normal_pair(key + (static_cast<uint64_t>(first) + i) * 0x9e3779b97f4a7c15u, values[i], values[i + 1]);
    }
  }
  values.pop_back();
  write_plane(planes, base, Plane::kMaster, segment.offset + first, values);
}

}  // namespace

void init_weights(const ModelLayout& layout, uint64_t seed, int threads, StateStore& states) {
  uint64_t stream = mixed(seed + 1);
  for (size_t param = 0; param < layout.flat_params.size(); ++param) {
    const int index = static_cast<int>(param);
    const StatePlanes& planes = states.planes(index);
    states.with_states(index, true, [&](std::byte* base) {
      for (const Segment& segment : layout.flat_params[param].segments) {
        stream = mixed(stream + 1);
        const int64_t pieces = ceil_div(segment.numel, kPieceElements);
        std::vector<std::thread> team;
        for (int worker = 0; worker < threads; ++worker) {
          team.emplace_back([&, worker] {
            for (int64_t piece = worker; piece < pieces; piece += threads) {
              init_piece(planes, base, segment, piece * kPieceElements, stream);
            }
          });
        }
        for (std::thread& member : team) member.join();
      }
    });
  }
}

}  // namespace orlop
