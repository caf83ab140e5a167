#include "zero/placement_plan.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <string>

#include "base/bytes.h"
#include "base/check.h"
#include "zero/placement_moves.h"
#include "zero/plan_check.h"
#include "zero/simulate.h"

namespace orlop {
namespace {

constexpr int kUsualPrefetch = 2;
constexpr int kMaxSwapAhead = 4;

// Chunks are so large that a drive reads one at its full speed, and so many at most that plans stay
// small.
constexpr int64_t kUsualChunk = int64_t{1} << 20;  // elements
constexpr int64_t kMostChunks = 512;
constexpr int kUsualSlots = 4;
// All slots together take this part of the host budget at most; what is too small for that has
// fewer and smaller ones, down to the least, which are taken as they are.
constexpr size_t kSlotPart = 4;
constexpr int kLeastSlots = 2;
constexpr int64_t kLeastChunkPart = 16;  // of the usual chunk
// Host memory that gradients may take on their way to an update inside backward. More would let
// updates fall further behind, and is what clipping off is to save.
constexpr double kInFlightBytesPerParam = 0.5;

int64_t usual_chunk(const PlanInput& input) {
  const int64_t fair =
      ceil_div(input.layout.numel() / input.world_size, kMostChunks * kChunkGranule);
  return std::max(kUsualChunk, fair * kChunkGranule);
}

int64_t part_of_usual_chunk(const PlanInput& input, int64_t part) {
  return ceil_div(usual_chunk(input), part * kChunkGranule) * kChunkGranule;
}

// Last FlatParams of which some states are wanted on drives.
int blocks_on_drives(const PlanInput& input, const PlacementConfig& wanted) {
  PlacementPlan placement;
  placement.params.resize(input.layout.flat_params.size());
  set_wanted_nvme(input, placement, wanted, 0);
  return static_cast<int>(
      std::ranges::count(placement.params, Tier::kNvme, &ParamPlacement::optimizer));
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
        params_(static_cast<int>(input.layout.flat_params.size())),
        most_on_device_(params_ - blocks_on_drives(input, wanted)) {}

  PlannedStep run() {
    std::vector<Tier> homes = {Tier::kDevice, Tier::kHost};
    if (input_.evaluates_only) homes = {Tier::kDevice};  // a pass forward leaves none behind
    if (wanted_.activations) homes = {*wanted_.activations};
    std::optional<PlacementPlan> best = fastest(starts(homes));
    // They cross the drives twice a step, and that beside compute: after everything else.
    if (!best && !wanted_.activations && budgets_.nvme_bytes > 0)
      best = fastest(starts({Tier::kNvme}));
    if (!best) refuse(homes);
    PlannedStep planned = build(*best);
    if (!input_.evaluates_only) plan_check(input_, planned.placement, planned.train, true);
    plan_check(input_, planned.placement, planned.eval, false);
    return planned;
  }

 private:
  // What can be made of `starts` in the given budgets, as far as it fits.
  std::optional<PlacementPlan> fastest(const std::vector<PlacementPlan>& starts) const {
    std::optional<PlacementPlan> best;
    double best_seconds = 0;
    for (const PlacementPlan& start : starts) {
      PlacementPlan base = start;
      if (!fits(base) && !make_room_on_host(base) && !make_room_with_drives(base)) continue;
      if (!wanted_.prefetch_depth) {
        grow(base, 1, kUsualPrefetch, [](PlacementPlan& p, int n) { p.prefetch_depth = n; });
      }
      if (base.uses_nvme()) spend_on_swapping(base);
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
    return best;
  }

  PlannedStep build(const PlacementPlan& placement) const {
    PlannedStep planned{placement, {}, make_eval_plan(input_, placement)};
    if (!input_.evaluates_only) planned.train = make_train_plan(input_, placement);
    return planned;
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
           host_need(planned) <= budgets_.host_bytes &&
           planned.train.nvme_bytes <= budgets_.nvme_bytes && has_moderate_slots(planned);
  }

  bool has_moderate_slots(const PlannedStep& planned) const {
    size_t bytes = 0;
    for (const int slot : planned.train.swap_slots)
      bytes += planned.train.buffers[static_cast<size_t>(slot)].bytes;
    if (bytes <= budgets_.host_bytes / kSlotPart) return true;
    const PlacementPlan& placement = planned.placement;
    return placement.swap_slots <= kLeastSlots &&
           (wanted_.swap_chunk ||
            placement.chunk_numel <= part_of_usual_chunk(input_, kLeastChunkPart));
  }

  double seconds(const PlacementPlan& placement) const {
    const StepPlan plan = input_.evaluates_only ? make_eval_plan(input_, placement)
                                                : make_train_plan(input_, placement);
    return simulate(input_, plan, profile_).step_seconds;
  }

  // Every combination of home of the block inputs and of the wave that `wanted` leaves open, with
  // nothing resident: long waves cross the link less often, short ones hold fewer block inputs but
  // park gradients.
  std::vector<PlacementPlan> starts(const std::vector<Tier>& homes) const {
    const int all = input_.micro_batches;
    std::vector<int> waves = {all};
    if (all > 2) waves.push_back((all + 1) / 2);
    if (all > 1) waves.push_back(1);
    if (wanted_.wave) waves = {*wanted_.wave};
    std::vector<PlacementPlan> plans;
    for (const int wave : waves) {
      for (const Tier home : homes) {
        plans.push_back(smallest_placement(input_, wanted_));
        plans.back().wave = wave;
        plans.back().activations = home;
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
    for (int count = 1; count <= most_on_device_; ++count) {
      PlacementPlan candidate = placement;
      set_device_optimizer(input_, candidate, count);
      if (!fits(candidate)) continue;
      placement = candidate;
      return true;
    }
    return false;
  }

  // Moves the fewest states to the drives that let the rest fit into host memory, through slots as
  // large as there is room for; on the device goes what has room there, as it is needed nowhere
  // else then.
  bool make_room_with_drives(PlacementPlan& placement) const {
    if (budgets_.nvme_bytes == 0) return false;
    PlacementPlan base = placement;
    if (!wanted_.device_optimizer_blocks && !input_.device_is_host) {
      for (int count = 1; count <= most_on_device_; ++count) {
        PlacementPlan candidate = base;
        set_device_optimizer(input_, candidate, count);
        if (device_need(build(candidate)) > budgets_.device_bytes) break;
        placement = candidate;
      }
    }
    // Smaller slots come before compute copies, which cross the drives three times a step.
    for (const bool moves_copies : {false, true}) {
      for (const auto& [slots, part] : {std::pair(kUsualSlots, int64_t{1}),
                                        {kLeastSlots, 1},
                                        {kLeastSlots, 4},
                                        {kLeastSlots, kLeastChunkPart}}) {
        PlacementPlan candidate = placement;
        set_slots(candidate, slots, part);
        if (!fits(candidate) && !move_to_drives(candidate, moves_copies)) continue;
        placement = candidate;
        return true;
      }
    }
    placement = base;
    return false;
  }

  void set_slots(PlacementPlan& placement, int slots, int64_t part) const {
    placement.swap_slots = slots;
    if (wanted_.swap_chunk) return;
    placement.chunk_numel = part_of_usual_chunk(input_, part);
    set_wanted_nvme(input_, placement, wanted_, 0);
  }

  // The fewest chunks of optimizer states, or, with all of them there, of compute copies.
  bool move_to_drives(PlacementPlan& placement, bool copies) const {
    const int chunks = count_chunks(input_, placement);
    if (!copies) {
      return !wants_nvme_states(wanted_) &&
             least_that_fits(placement, chunks,
                             [this](PlacementPlan& p, int n) { set_nvme_states(input_, p, n); });
    }
    return !wants_nvme_copies(wanted_) &&
           least_that_fits(placement, chunks, [this](PlacementPlan& p, int n) {
             set_wanted_nvme(input_, p, wanted_, 1);
             set_nvme_copies(input_, p, n);
           });
  }

  // Applies `set(placement, n)` with the smallest n in [1, high] that fits.
  bool least_that_fits(PlacementPlan& placement, int high,
                       const std::function<void(PlacementPlan&, int)>& set) const {
    const auto with = [&](int count) {
      PlacementPlan candidate = placement;
      set(candidate, count);
      return candidate;
    };
    if (high < 1 || !fits(with(high))) return false;
    int low = 1;
    while (low < high) {
      const int middle = low + (high - low) / 2;
      if (fits(with(middle))) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    placement = with(high);
    return true;
  }

  // Spends host memory on block inputs that stay there, and on compute copies that leave the drives
  // earlier.
  void spend_on_swapping(PlacementPlan& placement) const {
    if (placement.activations == Tier::kNvme && !wanted_.activations) {
      const int inputs = placement.wave * (static_cast<int>(input_.layout.blocks.size()) - 2);
      grow(placement, 1, inputs - 1, [](PlacementPlan& p, int n) { p.host_inputs = n; });
    }
    const bool swaps_copies =
        std::any_of(placement.params.begin(), placement.params.end(),
                    [](const ParamPlacement& home) { return home.copy == Tier::kNvme; });
    if (!swaps_copies) return;
    grow(placement, 1, kMaxSwapAhead, [](PlacementPlan& p, int n) { p.swap_ahead = n; });
  }

  std::string host_remedy() const {
    std::string remedy = "raise the host budget to that";
    if (input_.evaluates_only) {
      return remedy +
             (input_.device_is_host ? "" : ", or the device budget: weights can live there");
    }
    if (budgets_.nvme_bytes == 0) {
      remedy += ", give directories on drives with --nvme, keep optimizer shards on the device";
    }
    return remedy + ", or use bf16 moments";
  }

  // Throws with the needs of the start that is short by the least.
  [[noreturn]] void refuse(std::vector<Tier> homes) const {
    if (!wanted_.activations && budgets_.nvme_bytes > 0) homes.push_back(Tier::kNvme);
    size_t least = SIZE_MAX;
    PlannedStep nearest;
    const auto shortage = [](size_t need, size_t budget) {
      return need > budget ? need - budget : 0;
    };
    for (PlacementPlan start : starts(homes)) {
      if (budgets_.nvme_bytes > 0) swap_all_that_may(start);
      const PlannedStep planned = build(start);
      const size_t total = shortage(device_need(planned), budgets_.device_bytes) +
                           shortage(host_need(planned), budgets_.host_bytes) +
                           shortage(planned.train.nvme_bytes, budgets_.nvme_bytes);
      if (total >= least) continue;
      least = total;
      nearest = planned;
    }
    const PlanReport report = make_report(input_, nearest, budgets_, profile_);
    std::string text =
        fmt::format("the {} does not fit:", input_.evaluates_only ? "evaluation" : "training step");
    const auto line = [&](Tier tier, size_t need, size_t budget, const std::string& remedy) {
      if (need <= budget) return;
      text += fmt::format("\n  {}: needs at least {} ({} B), budget {} ({} B), short by {}; {}",
                          tier_name(tier), format_bytes(need), need, format_bytes(budget), budget,
                          format_bytes(need - budget), remedy);
      for (const PlanLine& part : report.lines) {
        if (part.tier != tier) continue;
        text += fmt::format("\n    of it {} {}", part.purpose, format_bytes(part.bytes));
      }
    };
    line(Tier::kDevice, device_need(nearest), budgets_.device_bytes,
         "raise the device budget to that, or shorten the micro-batch or the sequence");
    line(Tier::kHost, host_need(nearest), budgets_.host_bytes, host_remedy());
    line(Tier::kNvme, nearest.train.nvme_bytes, budgets_.nvme_bytes,
         "raise limits.nvme to that, free space, or add a directory with --nvme");
    throw Error(ErrorCode::kDoesNotFit, text);
  }

  void swap_all_that_may(PlacementPlan& placement) const {
    set_slots(placement, kLeastSlots, kLeastChunkPart);
    set_wanted_nvme(input_, placement, wanted_, 1);
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
      // An evaluation would upload them all the same, each once.
      if (wanted_.resident_blocks || input_.evaluates_only) return;
      grow(placement, 1, params_, [&](PlacementPlan& p, int n) { set_resident(p, residency_, n); });
    };
    const auto shards = [&] {
      if (wanted_.device_optimizer_blocks || input_.device_is_host) return;
      grow(placement, 1, most_on_device_,
           [&](PlacementPlan& p, int n) { set_device_optimizer(input_, p, n); });
    };
    if (weights_first) weights();
    shards();
    if (!weights_first) weights();
    return placement;
  }

  const PlanInput& input_;
  const Budgets& budgets_;
  const PlacementConfig& wanted_;
  const HardwareProfile& profile_;
  std::vector<int> residency_;
  int params_;
  int most_on_device_;  // FlatParams that may be updated there
};

}  // namespace

PlacementPlan smallest_placement(const PlanInput& input, const PlacementConfig& wanted) {
  check_wanted(input, wanted);
  PlacementPlan placement;
  placement.params.resize(input.layout.flat_params.size());
  placement.prefetch_depth = wanted.prefetch_depth.value_or(0);
  placement.activations = wanted.activations.value_or(Tier::kHost);
  placement.wave = wanted.wave.value_or(1);
  set_resident(placement, residency_order(input.layout), wanted.resident_blocks.value_or(0));
  set_device_optimizer(input, placement, wanted.device_optimizer_blocks.value_or(0));
  placement.chunk_numel = wanted.swap_chunk.value_or(usual_chunk(input));
  placement.swap_slots = kUsualSlots;
  set_wanted_nvme(input, placement, wanted, 0);
  return placement;
}

PlannedStep make_placement(const PlanInput& input, const Budgets& budgets,
                           const PlacementConfig& wanted, const HardwareProfile& profile) {
  return Planner(input, budgets, wanted, profile).run();
}

}  // namespace orlop
