#include "zero/plan_check.h"

#include <array>
#include <map>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"

namespace orlop {
namespace {

// For every lane, the last operation that is certainly over when an operation starts.
using Clock = std::array<int, kPlanLanes>;

struct Touch {
  int op;
  int buffer;
  bool write;
};

class Checker {
 public:
  Checker(const PlanInput& input, const PlacementPlan& placement, const StepPlan& plan)
      : input_(input), placement_(placement), plan_(plan) {}

  void check_buffers() const {
    for (size_t i = 0; i < plan_.buffers.size(); ++i) {
      const PlanBuffer& buffer = plan_.buffers[i];
      check(buffer.offset % buffer.alignment == 0 &&
                buffer.offset + buffer.bytes <= plan_.arena_bytes(buffer.tier),
            ErrorCode::kInternal, "plan_check: buffer {} at {} + {} leaves its arena of {} bytes",
            i, buffer.offset, buffer.bytes, plan_.arena_bytes(buffer.tier));
      if (!buffer.persistent) continue;
      for (size_t j = 0; j < plan_.buffers.size(); ++j) {
        check(i == j || !bytes_meet(buffer, plan_.buffers[j]), ErrorCode::kInternal,
              "plan_check: persistent buffer {} shares bytes with buffer {}", i, j);
      }
    }
  }

  void check_order() const {
    std::vector<Clock> clocks;
    Clock last_of_lane;
    last_of_lane.fill(-1);
    std::vector<Touch> touches;
    for (size_t i = 0; i < plan_.ops.size(); ++i) {
      const PlanOp& op = plan_.ops[i];
      Clock clock;
      clock.fill(-1);
      const auto join = [&](int earlier) {
        if (earlier < 0) return;
        const Clock& known = clocks[static_cast<size_t>(earlier)];
        for (size_t lane = 0; lane < clock.size(); ++lane)
          clock[lane] = std::max(clock[lane], known[lane]);
        const size_t lane = static_cast<size_t>(plan_.ops[static_cast<size_t>(earlier)].lane);
        clock[lane] = std::max(clock[lane], earlier);
      };
      join(last_of_lane[static_cast<size_t>(op.lane)]);
      for (const int wait : op.waits) {
        check(
            wait >= 0 && wait < static_cast<int>(i) && plan_.ops[static_cast<size_t>(wait)].signals,
            ErrorCode::kInternal, "plan_check: operation {} waits for {}, which does not signal", i,
            wait);
        join(wait);
      }
      for (const BufferUse& use : op.uses) check_use(static_cast<int>(i), use, clock, touches);
      for (const BufferUse& use : op.uses) {
        touches.push_back({static_cast<int>(i), use.buffer, use.write});
      }
      clocks.push_back(clock);
      last_of_lane[static_cast<size_t>(op.lane)] = static_cast<int>(i);
    }
  }

  void check_work(bool training) const {
    std::map<std::pair<int, int>, int> forward;  // (block, micro-batch) -> count
    std::map<std::pair<int, int>, int> backward;
    std::vector<int> rounded(placement_.params.size(), 0);
    std::vector<int> updated(placement_.params.size(), 0);
    ChunkCheck chunks;
    bool norm_known = false;
    int micro_batches = 0;
    for (const PlanOp& op : plan_.ops) {
      if (op.kind == OpKind::kUploadBatch) ++micro_batches;
      if (op.kind == OpKind::kForward) ++forward[{op.block, op.micro_batch}];
      if (op.kind == OpKind::kBackward) ++backward[{op.block, op.micro_batch}];
      if (op.kind == OpKind::kRoundGrad) ++rounded[static_cast<size_t>(op.param)];
      if (op.kind == OpKind::kFinishNorm) norm_known = true;
      if (op.kind == OpKind::kUploadParam || op.kind == OpKind::kSwapInParam) check_copies(op);
      if (is_host_update(op.kind) && op.chunk.index >= 0) check_chunk(op, chunks);
      if (op.kind == OpKind::kDeviceAdam || op.kind == OpKind::kHostAdam) {
        // Chunk by chunk, it counts when the last one is done.
        const bool whole = op.chunk.index < 0;
        const bool last = op.chunk.begin + op.chunk.numel == input_.numel(op.param);
        if (whole || last) ++updated[static_cast<size_t>(op.param)];
        check(norm_known, ErrorCode::kInternal,
              "plan_check: FlatParam {} is updated before the norm", op.param);
      }
    }
    const int head = static_cast<int>(input_.layout.blocks.size()) - 1;
    for (int mb = 0; mb < micro_batches; ++mb) {
      for (int b = 0; b <= head; ++b) {
        const int wanted_forward = training && b == head ? 0 : 1;
        check(forward[{b, mb}] == wanted_forward && backward[{b, mb}] == (training ? 1 : 0),
              ErrorCode::kInternal,
              "plan_check: block {} runs {} forward and {} backward on "
              "micro-batch {}",
              b, forward[{b, mb}], backward[{b, mb}], mb);
      }
    }
    for (size_t param = 0; training && param < placement_.params.size(); ++param) {
      check(rounded[param] == 1 && updated[param] == 1, ErrorCode::kInternal,
            "plan_check: FlatParam {} is rounded {} and updated {} times", param, rounded[param],
            updated[param]);
    }
  }

 private:
  // How far the chunk that is under way in each slot has come, and where the next one of each
  // FlatParam begins.
  struct ChunkCheck {
    std::map<int, std::pair<OpKind, std::pair<int, int>>> slots;  // buffer -> last, (param, chunk)
    std::map<int, int64_t> updated;                               // param -> elements
  };

  // Every chunk comes in, is updated and goes out in one slot, in the order of its elements.
  void check_chunk(const PlanOp& op, ChunkCheck& state) const {
    int slot = -1;
    for (const BufferUse& use : op.uses) {
      if (plan_.buffer(use).kind == BufferKind::kSwapSlot) slot = use.buffer;
    }
    const std::pair<int, int> chunk{op.param, op.chunk.index};
    const auto found = state.slots.find(slot);
    bool ok = slot >= 0 && plan_.buffers[static_cast<size_t>(slot)].bytes >= op.swap_bytes;
    if (op.kind == OpKind::kSwapInStates) {
      ok = ok && (found == state.slots.end() || found->second.first == OpKind::kSwapOutStates);
    } else {
      const OpKind before =
          op.kind == OpKind::kHostAdam ? OpKind::kSwapInStates : OpKind::kHostAdam;
      ok = ok && found != state.slots.end() && found->second == std::pair(before, chunk);
    }
    if (op.kind == OpKind::kHostAdam) {
      int64_t& next = state.updated[op.param];
      ok = ok && op.chunk.begin == next;
      next += op.chunk.numel;
    }
    check(ok, ErrorCode::kInternal,
          "plan_check: {} of chunk {} of FlatParam {} in slot {} is out of turn", op_name(op.kind),
          op.chunk.index, op.param, slot);
    state.slots[slot] = {op.kind, chunk};
  }

  // What is uploaded, or comes up from a drive, is this FlatParam's, from where it is at home.
  void check_copies(const PlanOp& op) const {
    for (const BufferUse& use : op.uses) {
      const PlanBuffer& buffer = plan_.buffer(use);
      const bool from_nvme = placement_.params[static_cast<size_t>(op.param)].copy == Tier::kNvme;
      const bool at_home = buffer.tier == Tier::kDevice || buffer.persistent != from_nvme;
      check(buffer.param == op.param && at_home, ErrorCode::kInternal,
            "plan_check: {} of FlatParam {} uses a buffer of FlatParam {}", op_name(op.kind),
            op.param, buffer.param);
    }
  }

  static bool bytes_meet(const PlanBuffer& a, const PlanBuffer& b) {
    return a.tier == b.tier && a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
  }

  void check_use(int op_index, const BufferUse& use, const Clock& clock,
                 const std::vector<Touch>& touches) const {
    const PlanBuffer& buffer = plan_.buffer(use);
    check(op_index >= buffer.first_op && op_index <= buffer.last_op, ErrorCode::kInternal,
          "plan_check: operation {} uses buffer {} outside its lifetime", op_index, use.buffer);
    const bool is_staging = buffer.tier == Tier::kHost && buffer.kind == BufferKind::kBatch;
    bool written = buffer.persistent || is_staging || use.write;
    for (const Touch& touch : touches) {
      if (touch.buffer == use.buffer && touch.write) written = true;
      if (!(use.write || touch.write || touch.buffer != use.buffer)) continue;
      if (!bytes_meet(buffer, plan_.buffers[static_cast<size_t>(touch.buffer)])) continue;
      const size_t lane = static_cast<size_t>(plan_.ops[static_cast<size_t>(touch.op)].lane);
      check(lane == static_cast<size_t>(plan_.ops[static_cast<size_t>(op_index)].lane) ||
                clock[lane] >= touch.op,
            ErrorCode::kInternal,
            "plan_check: operations {} ({}) and {} ({}) touch the same bytes and are not ordered",
            touch.op, op_name(plan_.ops[static_cast<size_t>(touch.op)].kind), op_index,
            op_name(plan_.ops[static_cast<size_t>(op_index)].kind));
    }
    check(written, ErrorCode::kInternal,
          "plan_check: operation {} ({}) reads a buffer that nothing wrote", op_index,
          op_name(plan_.ops[static_cast<size_t>(op_index)].kind));
  }

  const PlanInput& input_;
  const PlacementPlan& placement_;
  const StepPlan& plan_;
};

}  // namespace

void plan_check(const PlanInput& input, const PlacementPlan& placement, const StepPlan& plan,
                bool training) {
  const Checker checker(input, placement, plan);
  checker.check_buffers();
  checker.check_order();
  checker.check_work(training);
}

}  // namespace orlop
