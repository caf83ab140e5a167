#include "zero/plan_check.h"

#include <map>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"

namespace orlop {
namespace {

// What is certainly over when an operation starts.
struct Clock {
  OpPerLane lanes = kNoOps;  // the last operation of every lane
  int update_before = -1;    // the last host update, as its index, of the step before

  void join(const Clock& other) {
    for (size_t lane = 0; lane < lanes.size(); ++lane)
      lanes[lane] = std::max(lanes[lane], other.lanes[lane]);
    update_before = std::max(update_before, other.update_before);
  }
};

struct Touch {
  int op;
  int buffer;
  bool write;
};

class Checker {
 public:
  Checker(const PlanInput& input, const PlacementPlan& placement, const StepPlan& plan)
      : input_(input), placement_(placement), plan_(plan) {}

  // Of a FlatParam on drives, some chunk is there, and no compute copy without its other states.
  void check_homes() const {
    for (size_t i = 0; i < placement_.params.size(); ++i) {
      const ParamPlacement& home = placement_.params[i];
      const int chunks = placement_.chunk_count(input_.shard_numel(static_cast<int>(i)));
      const bool states = home.optimizer == Tier::kNvme;
      const bool copy = home.copy == Tier::kNvme;
      check(
          (states || !copy) && home.host_chunks >= 0 && home.host_chunks < (states ? chunks : 1) &&
              home.host_copies >= (copy ? home.host_chunks : 0) &&
              home.host_copies < (copy ? chunks : 1),
          ErrorCode::kInternal,
          "plan_check: FlatParam {} has {} chunks, keeps the states of {} and the copies of {} in "
          "host memory",
          i, chunks, home.host_chunks, home.host_copies);
    }
  }

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
    OpPerLane last_of_lane = kNoOps;
    std::vector<Touch> touches;
    const std::vector<Touch> before = host_updates();
    for (size_t i = 0; i < plan_.ops.size(); ++i) {
      const PlanOp& op = plan_.ops[i];
      Clock clock;
      const auto join = [&](int earlier) {
        if (earlier < 0) return;
        clock.join(clocks[static_cast<size_t>(earlier)]);
        int& known = clock.lanes[static_cast<size_t>(plan_.ops[static_cast<size_t>(earlier)].lane)];
        known = std::max(known, earlier);
      };
      join(last_of_lane[static_cast<size_t>(op.lane)]);
      for (const int wait : op.waits) {
        check(
            wait >= 0 && wait < static_cast<int>(i) && plan_.ops[static_cast<size_t>(wait)].signals,
            ErrorCode::kInternal, "plan_check: operation {} waits for {}, which does not signal", i,
            wait);
        join(wait);
      }
      for (const Touch& touch : before) {
        // Host updates run in order: the first of a step runs after the last of the step before.
        if (is_host_update(op.kind) ||
            plan_.ops[static_cast<size_t>(touch.op)].param == op.after_update) {
          clock.update_before = std::max(clock.update_before, touch.op);
        }
      }
      if (op.kind == OpKind::kSwapInParam) check_comes_after_update(op, clock, before);
      for (const BufferUse& use : op.uses) {
        check_use(static_cast<int>(i), use, clock, touches);
        check_use_after_updates(static_cast<int>(i), use, clock, before);
      }
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
    bool norm_known = !input_.updates_wait_for_norm;
    int micro_batches = 0;
    for (const PlanOp& op : plan_.ops) {
      if (op.kind == OpKind::kUploadBatch) ++micro_batches;
      if (op.kind == OpKind::kForward) ++forward[{op.block, op.micro_batch}];
      if (op.kind == OpKind::kBackward) ++backward[{op.block, op.micro_batch}];
      if (op.kind == OpKind::kForward || op.kind == OpKind::kBackward) check_old(op, updated);
      if (op.kind == OpKind::kRoundGrad) ++rounded[static_cast<size_t>(op.param)];
      if (op.kind == OpKind::kFinishNorm) norm_known = true;
      if (op.kind == OpKind::kUploadParam || op.kind == OpKind::kSwapInParam) check_copies(op);
      check_input(op);
      if (is_host_update(op.kind) && op.chunk.index >= 0) check_chunk(op, chunks);
      if (op.kind == OpKind::kDeviceAdam || op.kind == OpKind::kHostAdam) {
        check_elements(op, chunks);
        // Part by part, it counts when the last one is done.
        const bool last = op.chunk.begin + op.chunk.numel == input_.shard_numel(op.param);
        if (last) ++updated[static_cast<size_t>(op.param)];
        check(norm_known && rounded[static_cast<size_t>(op.param)] > 0, ErrorCode::kInternal,
              "plan_check: FlatParam {} is updated before {}", op.param,
              norm_known ? "its gradient is rounded" : "the norm");
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
    if (input_.world_size > 1) check_collectives(training);
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

  // What is at home in memory is updated there, then what is on drives, in the order of elements.
  void check_elements(const PlanOp& op, ChunkCheck& state) const {
    const bool on_nvme = placement_.params[static_cast<size_t>(op.param)].optimizer == Tier::kNvme;
    const bool in_memory = op.chunk.index < 0;
    const int64_t all_in_memory =
        on_nvme ? placement_.host_states_numel(op.param) : input_.shard_numel(op.param);
    const bool at_home = in_memory ? op.chunk.numel == all_in_memory
                                   : placement_.states_are_on_nvme(op.param, op.chunk);
    int64_t& next = state.updated[op.param];
    check(at_home && op.chunk.begin == next, ErrorCode::kInternal,
          "plan_check: {} of elements [{}, {}) of FlatParam {} in {}: element {} is next",
          op_name(op.kind), op.chunk.begin, op.chunk.begin + op.chunk.numel, op.param,
          in_memory ? "memory" : "a slot", next);
    next += op.chunk.numel;
  }

  // Every chunk comes in, is updated and goes out in one slot.
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
    check(ok, ErrorCode::kInternal,
          "plan_check: {} of chunk {} of FlatParam {} in slot {} is out of turn", op_name(op.kind),
          op.chunk.index, op.param, slot);
    state.slots[slot] = {op.kind, chunk};
  }

  // What is uploaded, or comes up from a drive, is this FlatParam's, each part from where it is at
  // home, and all of it.
  void check_copies(const PlanOp& op) const {
    const size_t whole = input_.shard_param_bytes(op.param);
    const size_t element = dtype_bytes(input_.compute_dtype);
    const size_t at_home = element * static_cast<size_t>(placement_.host_copy_numel(
                                         op.param, input_.shard_numel(op.param)));
    size_t covered = op.kind == OpKind::kUploadParam ? 0 : at_home;
    for (const BufferUse& use : op.uses) {
      const PlanBuffer& buffer = plan_.buffer(use);
      check(buffer.param == op.param, ErrorCode::kInternal,
            "plan_check: {} of FlatParam {} uses a buffer of FlatParam {}", op_name(op.kind),
            op.param, buffer.param);
      if (buffer.tier == Tier::kDevice) continue;
      const size_t wanted = buffer.persistent ? at_home : whole - at_home;
      check((wanted > 0 || whole == 0) && buffer.bytes >= wanted &&
                (buffer.persistent || covered == at_home),
            ErrorCode::kInternal,
            "plan_check: {} of FlatParam {} takes {} B from a buffer of {} B in {}",
            op_name(op.kind), op.param, wanted, buffer.bytes,
            buffer.persistent ? "its home" : "its way from a drive");
      covered += wanted;
    }
    check(covered == whole, ErrorCode::kInternal,
          "plan_check: {} of FlatParam {} brings {} of {} B", op_name(op.kind), op.param, covered,
          whole);
  }

  // What moves a block input moves that of its block and micro-batch, all of it.
  void check_input(const PlanOp& op) const {
    const bool moves = op.kind == OpKind::kOffloadInput || op.kind == OpKind::kUploadInput ||
                       op.kind == OpKind::kSwapOutInput || op.kind == OpKind::kSwapInInput;
    if (!moves) return;
    for (const BufferUse& use : op.uses) {
      const PlanBuffer& buffer = plan_.buffer(use);
      check(buffer.kind == BufferKind::kInput && buffer.block == op.block &&
                buffer.micro_batch == op.micro_batch &&
                buffer.bytes >= std::max(input_.activation_bytes(), op.swap_bytes),
            ErrorCode::kInternal,
            "plan_check: {} of block {}, micro-batch {}, uses a buffer of {} B for block {}, "
            "micro-batch {}",
            op_name(op.kind), op.block, op.micro_batch, buffer.bytes, buffer.block,
            buffer.micro_batch);
    }
  }

  // What the host updates of a step touch.
  std::vector<Touch> host_updates() const {
    std::vector<Touch> touches;
    for (size_t i = 0; i < plan_.ops.size(); ++i) {
      if (plan_.ops[i].lane != PlanLaneKind::kOptimizer) continue;
      for (const BufferUse& use : plan_.ops[i].uses) {
        touches.push_back({static_cast<int>(i), use.buffer, use.write});
      }
    }
    return touches;
  }

  // What comes up from a drive is what the step before made of it.
  void check_comes_after_update(const PlanOp& op, const Clock& clock,
                                const std::vector<Touch>& before) const {
    for (const Touch& touch : before) {
      const bool is_own = plan_.ops[static_cast<size_t>(touch.op)].param == op.param;
      check(
          !is_own || clock.update_before >= touch.op, ErrorCode::kInternal,
          "plan_check: FlatParam {} comes up from a drive and is not ordered after its update, {}",
          op.param, touch.op);
    }
  }

  // A block runs with the weights of all ranks, and what is rounded is the sum over all ranks.
  void check_collectives(bool training) const {
    std::vector<bool> gathered(plan_.buffers.size(), false);
    std::vector<int> reduced(placement_.params.size(), 0);
    std::vector<int> stations(placement_.params.size(), 0);
    for (const PlanOp& op : plan_.ops) {
      if (op.kind == OpKind::kAllGather)
        gathered[static_cast<size_t>(op.uses.front().buffer)] = true;
      const bool sums = op.kind == OpKind::kReduceScatter || op.kind == OpKind::kSumGrad;
      if (sums) ++reduced[static_cast<size_t>(op.param)];
      check_journey(op, stations);
      if (op.kind == OpKind::kRoundGrad) {
        check(reduced[static_cast<size_t>(op.param)] == 1, ErrorCode::kInternal,
              "plan_check: FlatParam {} is rounded before it is summed over the ranks", op.param);
      }
      if (op.kind != OpKind::kForward && op.kind != OpKind::kBackward) continue;
      for (const BufferUse& use : op.uses) {
        check(plan_.buffer(use).kind != BufferKind::kParam ||
                  gathered[static_cast<size_t>(use.buffer)],
              ErrorCode::kInternal,
              "plan_check: {} of block {} reads FlatParam {} before all ranks have brought it",
              op_name(op.kind), op.block, plan_.buffer(use).param);
      }
    }
    for (size_t param = 0; training && param < reduced.size(); ++param) {
      check(reduced[param] == 1, ErrorCode::kInternal,
            "plan_check: FlatParam {} is summed over the ranks {} times", param, reduced[param]);
    }
  }

  // In 16 bits a gradient is rounded, exchanged and summed, one after the other. `stations` counts
  // how many of these a FlatParam's has behind it.
  void check_journey(const PlanOp& op, std::vector<int>& stations) const {
    const int station = op.kind == OpKind::kNarrowGrad     ? 0
                        : op.kind == OpKind::kExchangeGrad ? 1
                        : op.kind == OpKind::kSumGrad      ? 2
                                                           : -1;
    if (station < 0) return;
    int& behind = stations[static_cast<size_t>(op.param)];
    check(behind == station && input_.gradient_wire != DType::kF32, ErrorCode::kInternal,
          "plan_check: {} of FlatParam {}, whose gradients travel as {}, comes after {} stations",
          op_name(op.kind), op.param, dtype_name(input_.gradient_wire), behind);
    ++behind;
  }

  // A block runs with the weights that the step began with.
  void check_old(const PlanOp& op, const std::vector<int>& updated) const {
    for (const int param : input_.layout.blocks[static_cast<size_t>(op.block)].flat_params) {
      check(updated[static_cast<size_t>(param)] == 0, ErrorCode::kInternal,
            "plan_check: {} of block {} runs after the update of FlatParam {}", op_name(op.kind),
            op.block, param);
    }
  }

  // Updates of the step before may still run: what they touch is left alone until they are over.
  void check_use_after_updates(int op_index, const BufferUse& use, const Clock& clock,
                               const std::vector<Touch>& before) const {
    for (const Touch& touch : before) {
      if (!(use.write || touch.write || touch.buffer != use.buffer)) continue;
      if (!bytes_meet(plan_.buffer(use), plan_.buffers[static_cast<size_t>(touch.buffer)]))
        continue;
      check(clock.update_before >= touch.op, ErrorCode::kInternal,
            "plan_check: operation {} ({}) touches bytes of an update of the step before, {}, and "
            "is not ordered after it",
            op_index, op_name(plan_.ops[static_cast<size_t>(op_index)].kind), touch.op);
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
                clock.lanes[lane] >= touch.op,
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
  checker.check_homes();
  checker.check_buffers();
  checker.check_order();
  checker.check_work(training);
}

}  // namespace orlop
