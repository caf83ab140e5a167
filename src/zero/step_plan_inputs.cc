#include "zero/step_plan_inputs.h"

#include <algorithm>
#include <utility>

namespace orlop {
namespace {

// Host buffers that are filled while others go to the drives, and that come back ahead of their
// upload.
constexpr size_t kGoingOut = 2;
constexpr int kComingIn = 2;

}  // namespace

void BlockInputs::begin_wave(int begin, int end) {
  begin_ = begin;
  end_ = end;
  on_device_.assign(static_cast<size_t>(draft_.blocks() + 1),
                    std::vector<int>(static_cast<size_t>(end - begin), -1));
  on_host_ = on_drive_ = on_device_;
  going_out_.clear();
  swapped_in_ = 0;
}

int BlockInputs::position(int block, int micro_batch) const {
  if (block > last_block()) return -1;
  return (last_block() - block) * (end_ - begin_) + micro_batch - begin_;
}

int BlockInputs::add_on_host(int block, int micro_batch) {
  const int buffer = draft_.add_activation(BufferKind::kInput, block, micro_batch, Tier::kHost);
  if (draft_.placement.activations == Tier::kNvme) {
    draft_.buffer(buffer).bytes = draft_.input.drive_activation_bytes();
    draft_.buffer(buffer).alignment = kDriveAlignment;
  }
  return buffer;
}

void BlockInputs::put_away(int block, int micro_batch) {
  const PlacementPlan& placement = draft_.placement;
  if (placement.activations == Tier::kDevice || block > last_block()) return;
  const bool goes_to_drive =
      placement.activations == Tier::kNvme && position(block, micro_batch) >= placement.host_inputs;
  const int on_host = add_on_host(block, micro_batch);
  if (goes_to_drive) {
    // The next input is filled while those before it are on their way out.
    const int next = static_cast<int>(draft_.plan.ops.size());
    for (const int earlier : going_out_) draft_.keep_until(earlier, next);
    going_out_.push_back(on_host);
    if (going_out_.size() > kGoingOut - 1) going_out_.pop_front();
  }
  PlanOp& op = draft_.emit(OpKind::kOffloadInput, PlanLaneKind::kOffload,
                           {{on_device(block, micro_batch), false}, {on_host, true}});
  op.block = block;
  op.micro_batch = micro_batch;
  if (goes_to_drive) {
    swap_out(block, micro_batch, on_host);
  } else {
    at(on_host_, block, micro_batch) = on_host;
  }
}

void BlockInputs::swap_out(int block, int micro_batch, int on_host) {
  const int on_drive = draft_.add_activation(BufferKind::kInput, block, micro_batch, Tier::kNvme);
  draft_.buffer(on_drive).bytes = draft_.input.drive_activation_bytes();
  draft_.buffer(on_drive).alignment = kDriveAlignment;
  at(on_drive_, block, micro_batch) = on_drive;
  PlanOp& op = draft_.emit(OpKind::kSwapOutInput, PlanLaneKind::kSwapOut,
                           {{on_host, false}, {on_drive, true}});
  op.block = block;
  op.micro_batch = micro_batch;
  op.swap_bytes = draft_.input.drive_activation_bytes();
}

void BlockInputs::swap_in_until(int position) {
  const int wave = end_ - begin_;
  for (; swapped_in_ < std::min(position, count()); ++swapped_in_) {
    const int block = last_block() - swapped_in_ / wave;
    const int micro_batch = begin_ + swapped_in_ % wave;
    const int on_drive = std::exchange(at(on_drive_, block, micro_batch), -1);
    if (on_drive < 0) continue;
    const int on_host = add_on_host(block, micro_batch);
    at(on_host_, block, micro_batch) = on_host;
    PlanOp& op = draft_.emit(OpKind::kSwapInInput, PlanLaneKind::kSwapIn,
                             {{on_drive, false}, {on_host, true}});
    op.block = block;
    op.micro_batch = micro_batch;
    op.swap_bytes = draft_.input.drive_activation_bytes();
  }
}

void BlockInputs::bring_back(int block, int micro_batch) {
  if (block < 1 || block > last_block()) return;
  swap_in_until(position(block, micro_batch) + 1);
  const int on_host = std::exchange(at(on_host_, block, micro_batch), -1);
  if (on_host < 0) return;
  on_device(block, micro_batch) = draft_.add_activation(BufferKind::kInput, block, micro_batch);
  PlanOp& op = draft_.emit(OpKind::kUploadInput, PlanLaneKind::kUpload,
                           {{on_host, false}, {on_device(block, micro_batch), true}});
  op.block = block;
  op.micro_batch = micro_batch;
}

void BlockInputs::bring_ahead(int block, int micro_batch) {
  if (draft_.placement.prefetch_depth > 0) {
    if (micro_batch + 1 < end_) {
      bring_back(block, micro_batch + 1);
    } else {
      bring_back(block - 1, begin_);
    }
  }
  swap_in_until(position(block, micro_batch) + 1 + kComingIn);
}

}  // namespace orlop
