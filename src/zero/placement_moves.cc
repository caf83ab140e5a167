#include "zero/placement_moves.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "base/check.h"

namespace orlop {
namespace {

constexpr int kMaxPrefetch = 8;

// Puts all but the first `in_memory` of a FlatParam's chunks on drives.
void set_states(ParamPlacement& home, int in_memory, int chunks) {
  home.optimizer = in_memory < chunks ? Tier::kNvme : Tier::kHost;
  home.host_chunks = in_memory < chunks ? in_memory : 0;
}

void set_copies(ParamPlacement& home, int in_memory, int chunks) {
  if (home.optimizer != Tier::kNvme) in_memory = chunks;
  in_memory = std::max(in_memory, home.host_chunks);
  home.copy = in_memory < chunks ? Tier::kNvme : Tier::kHost;
  home.host_copies = in_memory < chunks ? in_memory : 0;
}

// Calls `set(home, chunks that stay in memory, chunks)` for every FlatParam that is not updated on
// the device, so that the last `count` chunks go.
template <typename Set>
void for_last_chunks(const PlanInput& input, PlacementPlan& placement, int count, const Set& set) {
  for (size_t i = placement.params.size(); i-- > 0;) {
    ParamPlacement& home = placement.params[i];
    if (home.optimizer == Tier::kDevice) continue;
    const int chunks = placement.chunk_count(input.shard_numel(static_cast<int>(i)));
    const int taken = std::min(count, chunks);
    set(home, chunks - taken, chunks);
    count -= taken;
  }
}

int share_of(double share, int chunks) {
  return static_cast<int>(std::ceil(share * static_cast<double>(chunks)));
}

}  // namespace

void check_wanted(const PlanInput& input, const PlacementConfig& wanted) {
  const int params = static_cast<int>(input.layout.flat_params.size());
  const auto in_range = [](const auto& value, auto low, auto high, const char* field) {
    check(!value || (*value >= low && *value <= high), ErrorCode::kUsage,
          "placement.{} is {}; it must lie between {} and {}", field, value.value_or(0), low, high);
  };
  in_range(wanted.prefetch_depth, 0, kMaxPrefetch, "prefetch_depth");
  in_range(wanted.resident_blocks, 0, params, "resident_blocks");
  in_range(wanted.device_optimizer_blocks, 0, params, "device_optimizer_blocks");
  in_range(wanted.wave, 1, input.micro_batches, "wave");
  in_range(wanted.nvme_optimizer_blocks, 0, params, "nvme_optimizer_blocks");
  in_range(wanted.nvme_param_blocks, 0, wanted.nvme_optimizer_blocks.value_or(params),
           "nvme_param_blocks");
  in_range(wanted.nvme_optimizer_share, 0.0, 1.0, "nvme_optimizer_share");
  in_range(wanted.nvme_param_share, 0.0, wanted.nvme_optimizer_share.value_or(1),
           "nvme_param_share");
  const int64_t chunk = wanted.swap_chunk.value_or(kChunkGranule);
  check(chunk > 0 && chunk % kChunkGranule == 0, ErrorCode::kUsage,
        "placement.swap_chunk is {} elements; it must be a multiple of {}", chunk, kChunkGranule);
}

std::vector<int> residency_order(const ModelLayout& layout) {
  std::vector<int> layers;
  std::vector<int> others;
  for (const BlockLayout& block : layout.blocks) {
    std::vector<int>& order = block.kind == BlockKind::kTransformer ? layers : others;
    for (const int param : block.flat_params) {
      if (std::find(others.begin(), others.end(), param) == others.end()) order.push_back(param);
    }
  }
  std::reverse(layers.begin(), layers.end());
  std::reverse(others.begin(), others.end());
  layers.insert(layers.end(), others.begin(), others.end());
  return layers;
}

void set_resident(PlacementPlan& placement, const std::vector<int>& order, int count) {
  for (int i = 0; i < count; ++i) {
    placement.params[static_cast<size_t>(order[static_cast<size_t>(i)])].resident = true;
  }
}

void set_device_optimizer(const PlanInput& input, PlacementPlan& placement, int count) {
  for (int i = 0; i < count; ++i) {
    ParamPlacement& home = placement.params[static_cast<size_t>(i)];
    home.optimizer = Tier::kDevice;
    home.resident = home.resident || input.world_size == 1;
  }
}

int count_chunks(const PlanInput& input, const PlacementPlan& placement) {
  int count = 0;
  for (size_t i = 0; i < placement.params.size(); ++i) {
    if (placement.params[i].optimizer != Tier::kDevice)
      count += placement.chunk_count(input.shard_numel(static_cast<int>(i)));
  }
  return count;
}

void set_nvme_states(const PlanInput& input, PlacementPlan& placement, int count) {
  for_last_chunks(input, placement, count, [](ParamPlacement& home, int in_memory, int chunks) {
    const int before = home.optimizer == Tier::kNvme ? home.host_chunks : chunks;
    set_states(home, std::min(before, in_memory), chunks);
  });
}

void set_nvme_copies(const PlanInput& input, PlacementPlan& placement, int count) {
  for_last_chunks(input, placement, count, set_copies);
}

bool wants_nvme_states(const PlacementConfig& wanted) {
  return wanted.nvme_optimizer_blocks || wanted.nvme_optimizer_share;
}

bool wants_nvme_copies(const PlacementConfig& wanted) {
  return wanted.nvme_param_blocks || wanted.nvme_param_share;
}

// Compute copies need their chunks' states there.
void set_wanted_nvme(const PlanInput& input, PlacementPlan& placement,
                     const PlacementConfig& wanted, double otherwise) {
  const int params = static_cast<int>(placement.params.size());
  const bool states_follow = !wants_nvme_states(wanted) && wants_nvme_copies(wanted);
  const auto share = [&](const std::optional<int>& blocks, const std::optional<double>& of_each,
                         int param) {
    if (!blocks && !of_each) return otherwise;
    return param >= params - blocks.value_or(params) ? of_each.value_or(1) : 0.0;
  };
  for (int param = 0; param < params; ++param) {
    ParamPlacement& home = placement.params[static_cast<size_t>(param)];
    if (home.optimizer == Tier::kDevice) continue;
    const int chunks = placement.chunk_count(input.shard_numel(param));
    const double copies = share(wanted.nvme_param_blocks, wanted.nvme_param_share, param);
    const double states = share(wanted.nvme_optimizer_blocks, wanted.nvme_optimizer_share, param);
    set_states(home,
               chunks - share_of(states_follow ? std::max(copies, otherwise) : states, chunks),
               chunks);
    set_copies(home, chunks - share_of(copies, chunks), chunks);
  }
}

}  // namespace orlop
