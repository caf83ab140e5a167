#include "zero/step_plan_fetches.h"

#include <algorithm>
#include <utility>

namespace orlop {

// A FlatParam goes once no visit needs it for which the turn of fetching has come.
void ParamFetches::begin_wave(const std::vector<PlanVisit>& visits) {
  stays_.clear();
  swapped_in_ = 0;
  brought_up_ = 0;
  std::vector<int> on_device(static_cast<size_t>(draft_.params()), -1);
  for (int param = 0; param < draft_.params(); ++param) draft_.param(param).device_copy = -1;
  const int count = static_cast<int>(visits.size());
  int fetched = 0;
  for (int visit = 0; visit < count; ++visit) {
    for (; fetched <= std::min(count - 1, visit + draft_.placement.prefetch_depth); ++fetched) {
      const PlanVisit& next = visits[static_cast<size_t>(fetched)];
      if (!needs_params(next)) continue;
      for (const int param : draft_.block(next.block).flat_params) {
        int& stay = on_device[static_cast<size_t>(param)];
        if (stay < 0) {
          stay = static_cast<int>(stays_.size());
          stays_.push_back({param, fetched, fetched, needs_filling(param)});
        }
        stays_[static_cast<size_t>(stay)].last_visit = fetched;
      }
    }
    for (int& stay : on_device) {
      if (stay >= 0 && stays_[static_cast<size_t>(stay)].last_visit <= visit) stay = -1;
    }
  }
}

// A backward visit of the embedding reads no weight.
bool ParamFetches::needs_params(const PlanVisit& visit) const {
  return !(visit.backward && draft_.block(visit.block).kind == BlockKind::kEmbedding);
}

// What is resident is filled once per step, what is the states themselves never.
bool ParamFetches::needs_filling(int param) {
  StepPlanDraft::Param& of = draft_.param(param);
  if (of.resident_copy < 0) return true;
  return of.resident_copy != of.state && !std::exchange(of.uploaded, true);
}

// Copies on drives start earlier than the upload by swap_ahead visits.
void ParamFetches::fetch(int visit) {
  for (; swapped_in_ < stays_.size() &&
         stays_[swapped_in_].first_visit <= visit + draft_.placement.swap_ahead;
       ++swapped_in_) {
    Stay& stay = stays_[swapped_in_];
    if (stay.fills) stay.swapped_in = swap_in(stay.param);
  }
  for (; brought_up_ < stays_.size() && stays_[brought_up_].first_visit <= visit; ++brought_up_) {
    const Stay& stay = stays_[brought_up_];
    StepPlanDraft::Param& of = draft_.param(stay.param);
    of.device_copy = of.resident_copy >= 0
                         ? of.resident_copy
                         : draft_.add_param_buffer(BufferKind::kParam, stay.param,
                                                   draft_.input.param_bytes(stay.param));
    if (stay.fills) fill_device_copy(stay.param, stay.swapped_in);
  }
}

// Returns the buffer in pinned memory for the chunks of the compute copy that are on drives, side
// by side, or -1 where none is.
int ParamFetches::swap_in(int param) {
  if (draft_.home(param).copy != Tier::kNvme) return -1;
  size_t bytes = 0;
  for (const StateChunk& chunk : draft_.placement.chunks(draft_.input.shard_numel(param))) {
    if (draft_.placement.copy_is_on_nvme(param, chunk))
      bytes += chunk_copy_bytes(draft_.input, chunk);
  }
  const int copy = draft_.add_param_buffer(BufferKind::kParam, param, bytes, Tier::kHost);
  draft_.buffer(copy).alignment = kDriveAlignment;
  PlanOp& op = draft_.emit(OpKind::kSwapInParam, PlanLaneKind::kSwapIn, {{copy, true}});
  op.param = param;
  op.swap_bytes = bytes;
  return copy;
}

// Every rank brings its part, from host memory, what is at home there first, or from the states on
// its device.
void ParamFetches::fill_device_copy(int param, int swapped_in) {
  const StepPlanDraft::Param& of = draft_.param(param);
  std::vector<BufferUse> parts;
  for (const int part : {of.host_copy, swapped_in}) {
    if (part >= 0) parts.push_back({part, false});
  }
  if (!parts.empty()) {
    parts.push_back({of.device_copy, true});
    draft_.emit(OpKind::kUploadParam, PlanLaneKind::kUpload, parts).param = param;
  }
  if (!draft_.has_ranks()) return;
  std::vector<BufferUse> uses = {{of.device_copy, true}};
  if (draft_.is_on_device(param)) uses.push_back({of.state, false});
  draft_.emit(OpKind::kAllGather, PlanLaneKind::kComm, uses).param = param;
}

void ParamFetches::release(int visit) {
  for (size_t i = 0; i < brought_up_; ++i) {
    if (stays_[i].last_visit == visit) draft_.param(stays_[i].param).device_copy = -1;
  }
}

}  // namespace orlop
