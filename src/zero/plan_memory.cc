#include "zero/plan_memory.h"

#include <algorithm>
#include <array>
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
  LastUses() {
    any.fill(-1);
    write.fill(-1);
  }
  std::array<int, kPlanLanes> any;
  std::array<int, kPlanLanes> write;
};

}  // namespace

namespace {

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
  std::vector<LastUses> last(plan.buffers.size());
  for (size_t index = 0; index < plan.ops.size(); ++index) {
    PlanOp& op = plan.ops[index];
    std::array<int, kPlanLanes> needed;
    needed.fill(-1);
    for (const BufferUse& use : op.uses) {
      const auto need = [&](const std::array<int, kPlanLanes>& uses) {
        for (size_t lane = 0; lane < needed.size(); ++lane) {
          needed[lane] = std::max(needed[lane], uses[lane]);
        }
      };
      const LastUses& own = last[static_cast<size_t>(use.buffer)];
      need(use.write ? own.any : own.write);
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
    for (const BufferUse& use : op.uses) {
      LastUses& uses = last[static_cast<size_t>(use.buffer)];
      uses.any[static_cast<size_t>(op.lane)] = static_cast<int>(index);
      if (use.write) uses.write[static_cast<size_t>(op.lane)] = static_cast<int>(index);
    }
  }
}

}  // namespace orlop
