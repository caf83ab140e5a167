#include "zero/plan_memory.h"

#include <algorithm>
#include <numeric>

#include "base/bytes.h"

namespace orlop {
namespace {

bool lifetimes_meet(const PlanBuffer& a, const PlanBuffer& b) {
  return a.first_op <= b.last_op && b.first_op <= a.last_op;
}

bool bytes_meet(const PlanBuffer& a, const PlanBuffer& b) {
  return a.tier == b.tier && a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
}

struct Extent {
  size_t begin;
  size_t end;
};

// The lowest offset from `base` on at which `buffer` fits between the taken extents.
size_t lowest_gap(std::vector<Extent>& taken, size_t base, const PlanBuffer& buffer) {
  std::sort(taken.begin(), taken.end(),
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  size_t offset = align_up(base, buffer.alignment);
  for (const Extent& extent : taken) {
    if (offset + buffer.bytes <= extent.begin) break;
    offset = std::max(offset, align_up(extent.end, buffer.alignment));
  }
  return offset;
}

// Latest operations, per lane, that read or wrote a buffer.
struct LastUses {
  OpPerLane any = kNoOps;
  OpPerLane write = kNoOps;
};

// The last host update of a step that must be over before the next step reads, or writes, a buffer.
struct UpdateBefore {
  int read = -1;
  int write = -1;
};

std::vector<UpdateBefore> updates_before(const StepPlan& plan,
                                         const std::vector<std::vector<int>>& neighbours) {
  std::vector<UpdateBefore> before(plan.buffers.size());
  const int count = static_cast<int>(plan.ops.size());
  for (int index = 0; index < count; ++index) {
    const PlanOp& op = plan.ops[static_cast<size_t>(index)];
    if (op.lane != PlanLaneKind::kOptimizer) continue;
    for (const BufferUse& use : op.uses) {
      UpdateBefore& own = before[static_cast<size_t>(use.buffer)];
      own.write = index;
      if (use.write) own.read = index;
      for (const int other : neighbours[static_cast<size_t>(use.buffer)]) {
        before[static_cast<size_t>(other)] = {index, index};
      }
    }
  }
  return before;
}

// The last host update of every FlatParam.
std::vector<int> last_updates(const StepPlan& plan) {
  std::vector<int> updates;
  for (size_t index = 0; index < plan.ops.size(); ++index) {
    const size_t param = static_cast<size_t>(std::max(plan.ops[index].param, 0));
    if (param >= updates.size()) updates.resize(param + 1, -1);
    if (plan.ops[index].kind == OpKind::kHostAdam) updates[param] = static_cast<int>(index);
  }
  return updates;
}

// Places one tier's buffers and returns the size of its arena.
size_t assign_tier(std::vector<PlanBuffer>& buffers, Tier tier) {
  size_t base = 0;
  std::vector<size_t> transient;
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i].tier != tier) continue;
    if (!buffers[i].persistent) {
      transient.push_back(i);
      continue;
    }
    buffers[i].offset = align_up(base, buffers[i].alignment);
    base = align_up(buffers[i].offset + buffers[i].bytes, kDeviceAlignment);
  }
  std::stable_sort(transient.begin(), transient.end(),
                   [&](size_t a, size_t b) { return buffers[a].bytes > buffers[b].bytes; });
  size_t arena_bytes = base;
  std::vector<size_t> placed;
  std::vector<Extent> taken;
  for (const size_t i : transient) {
    PlanBuffer& buffer = buffers[i];
    taken.clear();
    for (const size_t other : placed) {
      if (lifetimes_meet(buffer, buffers[other])) {
        taken.push_back({buffers[other].offset, buffers[other].offset + buffers[other].bytes});
      }
    }
    buffer.offset = lowest_gap(taken, base, buffer);
    arena_bytes = std::max(arena_bytes, align_up(buffer.offset + buffer.bytes, kDeviceAlignment));
    placed.push_back(i);
  }
  return arena_bytes;
}

}  // namespace

void assign_offsets(StepPlan& plan) {
  plan.device_bytes = assign_tier(plan.buffers, Tier::kDevice);
  plan.host_bytes = assign_tier(plan.buffers, Tier::kHost);
  plan.nvme_input_bytes = assign_tier(plan.buffers, Tier::kNvme);
  plan.nvme_bytes += plan.nvme_input_bytes;
}

void derive_waits(StepPlan& plan) {
  // Buffers that lie, at some other time, on the same bytes.
  std::vector<std::vector<int>> neighbours(plan.buffers.size());
  for (size_t a = 0; a < plan.buffers.size(); ++a) {
    for (size_t b = 0; b < plan.buffers.size(); ++b) {
      if (a != b && bytes_meet(plan.buffers[a], plan.buffers[b])) {
        neighbours[a].push_back(static_cast<int>(b));
      }
    }
  }
  const std::vector<UpdateBefore> before = updates_before(plan, neighbours);
  constexpr auto kOptimizer = static_cast<size_t>(PlanLaneKind::kOptimizer);
  OpPerLane known_before = kNoOps;  // updates of the step before, per lane
  const std::vector<int> updates = last_updates(plan);
  std::vector<LastUses> last(plan.buffers.size());
  for (size_t index = 0; index < plan.ops.size(); ++index) {
    PlanOp& op = plan.ops[index];
    OpPerLane needed = kNoOps;
    int needed_before = -1;
    for (const BufferUse& use : op.uses) {
      const auto need = [&](const OpPerLane& uses) {
        for (size_t lane = 0; lane < needed.size(); ++lane) {
          needed[lane] = std::max(needed[lane], uses[lane]);
        }
      };
      const LastUses& own = last[static_cast<size_t>(use.buffer)];
      need(use.write ? own.any : own.write);
      const UpdateBefore& update = before[static_cast<size_t>(use.buffer)];
      needed_before = std::max(needed_before, use.write ? update.write : update.read);
      // A neighbour's bytes were another buffer's: whatever touched them must be over.
      for (const int other : neighbours[static_cast<size_t>(use.buffer)]) {
        need(last[static_cast<size_t>(other)].any);
      }
    }
    for (size_t lane = 0; lane < needed.size(); ++lane) {
      if (needed[lane] >= 0 && lane != static_cast<size_t>(op.lane)) {
        op.waits.push_back(needed[lane]);
        plan.ops[static_cast<size_t>(needed[lane])].signals = true;
      }
    }
    if (op.kind == OpKind::kSwapInParam) {
      needed_before = std::max(needed_before, updates[static_cast<size_t>(op.param)]);
    }
    // An update of this step runs after all of the step before.
    int& known = known_before[static_cast<size_t>(op.lane)];
    if (needed[kOptimizer] >= 0 || is_host_update(op.kind)) {
      known = static_cast<int>(plan.ops.size());
    } else if (needed_before > known) {
      op.after_update = plan.ops[static_cast<size_t>(needed_before)].param;
      known = needed_before;
    }
    for (const BufferUse& use : op.uses) {
      LastUses& uses = last[static_cast<size_t>(use.buffer)];
      uses.any[static_cast<size_t>(op.lane)] = static_cast<int>(index);
      if (use.write) uses.write[static_cast<size_t>(op.lane)] = static_cast<int>(index);
    }
  }
}

}  // namespace orlop
