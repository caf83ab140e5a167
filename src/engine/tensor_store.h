#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "memory/host_arena.h"
#include "orlop/tensor_optimizer.h"

namespace orlop {

// The planes of caller-owned tensors, one arena for every add(). Neither tensors nor arenas move.
class TensorStore {
 public:
  struct Arena {
    HostArena memory;
    // At its start, in whole pages: versions, weights and gradients, which devices copy and wait
    // for. What follows only the update on the host touches.
    size_t copied_bytes = 0;
  };

  struct Tensor {
    TensorSpec spec;
    TensorStates states;
    std::atomic<uint32_t>* written = nullptr;
    std::shared_ptr<Arena> arena;

    Gate gate() const { return Gate{written}; }
  };

  // All or nothing. Throws Error(kUsage) that names the tensor, Error(kDoesNotFit).
  int64_t add(std::span<const TensorSpec> specs);

  // The weights of a tensor whose specification names caller's memory are found at `weights` now.
  // Throws Error(kUsage) for another tensor and for an address that cannot be theirs.
  void move_weights(int64_t index, void* weights);

  // Forgets the states of a tensor, and their arena with its last tensor.
  void release(int64_t index);

  int64_t count() const { return static_cast<int64_t>(tensors_.size()); }
  // Throws Error(kUsage) for an index that there is not, or not any more.
  const Tensor& at(int64_t index) const;
  const std::vector<std::shared_ptr<Arena>>& arenas() const { return arenas_; }

 private:
  std::deque<Tensor> tensors_;
  std::vector<std::shared_ptr<Arena>> arenas_;
};

// What the formula reads and writes of one tensor in host memory; `gradient` may have any dtype it
// takes.
AdamShard adam_shard(const TensorStore::Tensor& tensor, const GradientView& gradient);

// The states of elements [first, first + numel) among those of a run, without a gradient.
AdamShard run_of(const AdamShard& states, int64_t first, int64_t numel);

// Throws Error(kUsage) unless the tensor has `count` elements.
void check_count(const TensorStore::Tensor& tensor, size_t count);

// The rest works on the states of a run of elements, a whole tensor's or a chunk's.

void read_master(const AdamShard& states, std::span<float> values);
void write_master(const AdamShard& states, std::span<const float> values);

// Weights that somebody has written are where the next update starts, wherever they and their
// states live: elements of an fp16 copy that are no longer the rounded master become the master;
// bf16 and fp32 weights are themselves of the master, beside whose bf16 a rest may stay that is at
// most half a unit in the last place (orlop/cpu_adam.h).
//
// `weights` (in the compute dtype) become the compute copy. Returns whether anything else changed.
bool adopt_weights(const AdamShard& states, const void* weights);
// The compute copy was written in place. Returns whether anything changed.
bool mend_master(const AdamShard& states, int threads);

}  // namespace orlop
