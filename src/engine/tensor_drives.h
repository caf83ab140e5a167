#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/tensor_store.h"
#include "engine/update_order.h"
#include "memory/host_arena.h"
#include "nvme/swapper.h"
#include "optim/optimizer_queue.h"
#include "orlop/tensor_optimizer.h"
#include "zero/param_states.h"

namespace orlop {

// The states on drives of caller-owned tensors: moments, and what of the master the weights do not
// hold, in chunks that each fit a slot. Updates pass through the first slots on the optimizer's
// thread; the last slot belongs to the caller's reads and writes between them. Only tensors that
// hold() says so are here.
class TensorDrives {
 public:
  // Makes the files. Throws as Swapper does, and Error(kUsage, kDoesNotFit) for the slots.
  explicit TensorDrives(const StateDrives& drives);

  // What the optimizer's queue is told.
  HostUpdates queue_options();
  size_t slot_memory() const { return arena_.capacity_bytes(); }

  // Whether states of such a tensor are here.
  static bool hold(const TensorSpec& spec) { return spec.on_drives && spec.numel > 0; }

  // Takes space for the states of tensors that will have the index `first` and those after it.
  // Nothing may be under way. All or nothing; Error(kDoesNotFit) with the bytes missing.
  void add(int64_t first, std::span<const TensorSpec> specs);

  // The update of a whole tensor, chunk by chunk. `begin` runs before the first, on the optimizer's
  // thread. Throws Error(kUsage) as adam_step() does.
  std::vector<ChunkUpdate> update(int64_t index, const TensorStore::Tensor& tensor,
                                  const TensorUpdate& update, int threads,
                                  const std::function<void()>& begin);
  // Chunks on their way in at once.
  size_t ahead() const;

  // Calls `use(states of a run, its first element in the tensor)` for runs that follow each other
  // over elements [first, first + numel); it returns whether it has changed what is not weights.
  // Nothing of the tensor may be under way.
  using Use = std::function<bool(const AdamShard& states, int64_t begin)>;
  void visit(int64_t index, const TensorStore::Tensor& tensor, int64_t first, int64_t numel,
             const Use& use);

  // As adopt_weights() of the tensor's states; chunks that cannot change stay on their drives.
  void adopt(int64_t index, const TensorStore::Tensor& tensor, const void* weights);

  int64_t piece_numel(int64_t index, int64_t first) const;

  // Brings what was changed between updates to its drive.
  void settle();

 private:
  struct Chunk {
    int64_t begin = 0;
    int64_t numel = 0;
    StatePlanes planes;    // of numel, rounded up
    bool is_blank = true;  // never written: zeros, and a master that the weights tell
  };

  // The chunk in the caller's slot.
  struct Loaded {
    int64_t tensor = -1;
    size_t chunk = 0;
    int64_t version = 0;
    bool is_dirty = false;
  };

  std::vector<Chunk>& chunks_of(int64_t index) { return chunks_[static_cast<size_t>(index)]; }
  std::byte* slot(size_t index) const { return arena_.data() + index * slot_bytes_; }
  std::byte* own_slot() const { return slot(update_slots_); }
  static StateAddress address(const TensorStore::Tensor& tensor, const Chunk& chunk,
                              std::byte* memory);
  SwapPiece piece(int64_t index, size_t chunk, std::byte* memory);
  bool is_loaded(int64_t index, size_t chunk) const;
  AdamShard load(int64_t index, const TensorStore::Tensor& tensor, size_t chunk);
  void move(const Loaded& chunk, bool writes);

  size_t slot_bytes_;
  size_t update_slots_;
  size_t next_slot_ = 0;  // of the next update
  HostArena arena_;
  std::vector<std::vector<Chunk>> chunks_;  // by tensor; empty where drives have no part
  std::vector<int64_t> versions_;           // by tensor: what its chunks hold
  std::vector<std::string> names_;          // by tensor
  std::optional<Loaded> loaded_;
  std::unique_ptr<nvme::Swapper> swapper_;  // last: it ends before the memory that it moves
};

}  // namespace orlop
