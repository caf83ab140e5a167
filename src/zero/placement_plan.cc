#include "zero/placement_plan.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <string>

#include "base/bytes.h"
#include "base/check.h"
#include "zero/plan_check.h"
#include "zero/simulate.h"

namespace orlop {
namespace {

constexpr int kMaxPrefetch = 8;
constexpr int kUsualPrefetch = 2;
// Host memory that gradients may take on their way to an update inside backward. More would let
// updates fall further behind, and is what clipping off is to save.
constexpr double kInFlightBytesPerParam = 0.5;

// FlatParams in the order in which they become resident: transformer layers from the last to the
// first, then the head's and the embedding's.
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

void check_wanted(const PlanInput& input, const PlacementConfig& wanted) {
  const int params = static_cast<int>(input.layout.flat_params.size());
  const auto in_range = [](const std::optional<int>& value, int low, int high, const char* field) {
    check(!value || (*value >= low && *value <= high), ErrorCode::kUsage,
          "placement.{} is {}; it must lie between {} and {}", field, value.value_or(0), low, high);
  };
  in_range(wanted.prefetch_depth, 0, kMaxPrefetch, "prefetch_depth");
  in_range(wanted.resident_blocks, 0, params, "resident_blocks");
  in_range(wanted.device_optimizer_blocks, 0, params, "device_optimizer_blocks");
  in_range(wanted.wave, 1, input.micro_batches, "wave");
}

class Planner {
 public:
  Planner(const PlanInput& input, const Budgets& budgets, const PlacementConfig& wanted,
          const HardwareProfile& profile)
      : input_(input),
        budgets_(budgets),
        wanted_(wanted),
        profile_(profile),
        residency_(residency_order(input.layout)),
        params_(static_cast<int>(input.layout.flat_params.size())) {}

  PlannedStep run() {
    std::optional<PlacementPlan> best;
    double best_seconds = 0;
    for (const PlacementPlan& start : starts()) {
      PlacementPlan base = start;
      if (!fits(base) && !make_room_on_host(base)) continue;
      if (!wanted_.prefetch_depth) {
        grow(base, 1, kUsualPrefetch, [](PlacementPlan& p, int n) { p.prefetch_depth = n; });
      }
      if (!input_.updates_wait_for_norm) {
        grow(base, 2, most_in_flight(), [](PlacementPlan& p, int n) { p.gradients_in_flight = n; });
      }
      for (const bool weights_first : {true, false}) {
        const PlacementPlan candidate = spend(base, weights_first);
        const double time = seconds(candidate);
        if (!best || time < best_seconds) {
          best = candidate;
          best_seconds = time;
        }
      }
    }
    if (!best) refuse();
    PlannedStep planned = build(*best);
    plan_check(input_, planned.placement, planned.train, true);
    plan_check(input_, planned.placement, planned.eval, false);
    return planned;
  }

 private:
  PlannedStep build(const PlacementPlan& placement) const {
    return {placement, make_train_plan(input_, placement), make_eval_plan(input_, placement)};
  }

  size_t device_need(const PlannedStep& planned) const {
    return input_.device_fixed_bytes +
           std::max(planned.train.device_bytes, planned.eval.device_bytes);
  }
  size_t host_need(const PlannedStep& planned) const {
    return std::max(planned.train.host_bytes, planned.eval.host_bytes);
  }

  bool fits(const PlacementPlan& placement) const {
    const PlannedStep planned = build(placement);
    return device_need(planned) <= budgets_.device_bytes &&
           host_need(planned) <= budgets_.host_bytes;
  }

  double seconds(const PlacementPlan& placement) const {
    return simulate(input_, make_train_plan(input_, placement), profile_).step_seconds;
  }

  // Every combination of wave and home of the block inputs that `wanted` leaves open, with nothing
  // resident: long waves cross the link less often, short ones hold fewer block inputs but park
  // gradients.
  std::vector<PlacementPlan> starts() const {
    const int all = input_.micro_batches;
    std::vector<int> waves = {all};
    if (all > 2) waves.push_back((all + 1) / 2);
    if (all > 1) waves.push_back(1);
    if (wanted_.wave) waves = {*wanted_.wave};
    std::vector<bool> homes = {true, false};
    if (wanted_.activations_on_device) homes = {*wanted_.activations_on_device};
    std::vector<PlacementPlan> plans;
    for (const int wave : waves) {
      for (const bool on_device : homes) {
        plans.push_back(smallest_placement(input_, wanted_));
        plans.back().wave = wave;
        plans.back().activations_on_device = on_device;
      }
    }
    return plans;
  }

  // The largest number of gradients that, next to each other, keep to kInFlightBytesPerParam; with
  // two of them at least, one arrives while another is read.
  int most_in_flight() const {
    const double limit =
        kInFlightBytesPerParam * static_cast<double>(input_.layout.trainable_numel());
    for (int count = params_; count > 2; --count) {
      size_t most = 0;
      for (int first = 0; first + count <= params_; ++first) {
        size_t bytes = 0;
        for (int param = first; param < first + count; ++param)
          bytes += input_.rounded_grad_bytes(param);
        most = std::max(most, bytes);
      }
      if (static_cast<double>(most) <= limit) return count;
    }
    return 2;
  }

  // Moves the fewest optimizer shards to the device that let the rest fit into host memory.
  bool make_room_on_host(PlacementPlan& placement) const {
    if (wanted_.device_optimizer_blocks || input_.device_is_host) return false;
    for (int count = 1; count <= params_; ++count) {
      PlacementPlan candidate = placement;
      set_device_optimizer(input_, candidate, count);
      if (!fits(candidate)) continue;
      placement = candidate;
      return true;
    }
    return false;
  }

  // Throws with the needs of the start that is short by the least.
  [[noreturn]] void refuse() const {
    size_t least = SIZE_MAX;
    size_t device = 0;
    size_t host = 0;
    const auto shortage = [](size_t need, size_t budget) {
      return need > budget ? need - budget : 0;
    };
    for (const PlacementPlan& start : starts()) {
      const PlannedStep planned = build(start);
      const size_t total = shortage(device_need(planned), budgets_.device_bytes) +
                           shortage(host_need(planned), budgets_.host_bytes);
      if (total >= least) continue;
      least = total;
      device = device_need(planned);
      host = host_need(planned);
    }
    std::string text = "the training step does not fit:";
    const auto line = [&](const char* tier, size_t need, size_t budget, const char* remedy) {
      if (need <= budget) return;
      text += fmt::format("\n  {}: needs at least {} ({} B), budget {} ({} B), short by {}; {}",
                          tier, format_bytes(need), need, format_bytes(budget), budget,
                          format_bytes(need - budget), remedy);
    };
    line("device", device, budgets_.device_bytes,
         "raise the device budget to that, or shorten the micro-batch or the sequence");
    line("host", host, budgets_.host_bytes,
         "raise the host budget to that, keep optimizer shards on the device, or use bf16 moments");
    throw Error(ErrorCode::kDoesNotFit, text);
  }

  // Applies `set(placement, n)` with the largest n in [low, high] that fits; leaves it alone if
  // none does.
  void grow(PlacementPlan& placement, int low, int high,
            const std::function<void(PlacementPlan&, int)>& set) const {
    std::optional<PlacementPlan> best;
    while (low <= high) {
      const int middle = high - (high - low) / 2;
      PlacementPlan candidate = placement;
      set(candidate, middle);
      if (fits(candidate)) {
        best = candidate;
        low = middle + 1;
      } else {
        high = middle - 1;
      }
    }
    if (best) placement = *best;
  }

  PlacementPlan spend(PlacementPlan placement, bool weights_first) const {
    const auto weights = [&] {
      if (wanted_.resident_blocks) return;
      grow(placement, 1, params_, [&](PlacementPlan& p, int n) { set_resident(p, residency_, n); });
    };
    const auto shards = [&] {
      if (wanted_.device_optimizer_blocks || input_.device_is_host) return;
      grow(placement, 1, params_,
           [&](PlacementPlan& p, int n) { set_device_optimizer(input_, p, n); });
    };
    if (weights_first) weights();
    shards();
    if (!weights_first) weights();
    return placement;
  }

 public:
  static void set_resident(PlacementPlan& placement, const std::vector<int>& order, int count) {
    for (int i = 0; i < count; ++i) {
      placement.params[static_cast<size_t>(order[static_cast<size_t>(i)])].resident = true;
    }
  }

  // The first FlatParams in order of use: the next forward waits for their updates first. The
  // states of one rank are the whole weights, which so are resident; of several, a part.
  static void set_device_optimizer(const PlanInput& input, PlacementPlan& placement, int count) {
    for (int i = 0; i < count; ++i) {
      ParamPlacement& home = placement.params[static_cast<size_t>(i)];
      home.optimizer = Tier::kDevice;
      home.resident = home.resident || input.world_size == 1;
    }
  }

 private:
  const PlanInput& input_;
  const Budgets& budgets_;
  const PlacementConfig& wanted_;
  const HardwareProfile& profile_;
  std::vector<int> residency_;
  int params_;
};

}  // namespace

PlacementPlan smallest_placement(const PlanInput& input, const PlacementConfig& wanted) {
  check_wanted(input, wanted);
  PlacementPlan placement;
  placement.params.resize(input.layout.flat_params.size());
  placement.prefetch_depth = wanted.prefetch_depth.value_or(0);
  placement.activations_on_device = wanted.activations_on_device.value_or(false);
  placement.wave = wanted.wave.value_or(1);
  Planner::set_resident(placement, residency_order(input.layout),
                        wanted.resident_blocks.value_or(0));
  Planner::set_device_optimizer(input, placement, wanted.device_optimizer_blocks.value_or(0));
  return placement;
}

PlannedStep make_placement(const PlanInput& input, const Budgets& budgets,
                           const PlacementConfig& wanted, const HardwareProfile& profile) {
  return Planner(input, budgets, wanted, profile).run();
}

}  // namespace orlop
