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
#include "engine/weight_space.h"
#include "memory/host_arena.h"
#include "nvme/swapper.h"
#include "optim/optimizer_queue.h"
#include "orlop/tensor_optimizer.h"
#include "zero/param_states.h"

namespace orlop {

// The states on drives of caller-owned tensors: moments, and what of the master the weights do not
// hold, in chunks that each fit a slot, with the part of the weights where those are on drives,
// too. Updates pass through the first slots on the optimizer's thread; the last slot belongs to the
// caller's reads and writes between them. Only tensors that hold() says so are here.
class TensorDrives {
 public:
  // Makes the files. Throws as Swapper does, and Error(kUsage, kDoesNotFit) for the slots.
  explicit TensorDrives(const StateDrives& drives);
  // Nothing may be under way.
  ~TensorDrives();
  TensorDrives(const TensorDrives&) = delete;
  TensorDrives& operator=(const TensorDrives&) = delete;

  // What the optimizer's queue is told.
  HostUpdates queue_options();
  size_t slot_memory() const { return arena_.capacity_bytes(); }

  // Whether states of such a tensor are here.
  static bool hold(const TensorSpec& spec) { return spec.on_drives && spec.numel > 0; }
  static bool hold_weights(const TensorSpec& spec) {
    return hold(spec) && spec.weight_drives != nullptr;
  }

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

  // Comes before update() of some of these: no fetch reads what they are to change.
  void before_updates();
  // An update was submitted, which makes this version; weights on drives are it behind its gate.
  void expect(const TensorStore::Tensor& tensor, uint32_t version);
  // What was submitted has run: whether the weights that it wrote are on their drives.
  void flush_weights();

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
    std::vector<SwapPiece> pieces{};
  };

  std::vector<Chunk>& chunks_of(int64_t index) { return chunks_[static_cast<size_t>(index)]; }
  std::byte* slot(size_t index) const { return arena_.data() + index * slot_bytes_; }
  std::byte* own_slot() const { return slot(update_slots_); }
  static StateAddress address(const TensorStore::Tensor& tensor, const Chunk& chunk,
                              std::byte* memory);
  // What moves with a chunk: its states and, where they are on drives, its weights.
  std::vector<SwapPiece> pieces(int64_t index, const TensorStore::Tensor& tensor, size_t chunk,
                                std::byte* memory);
  int64_t chunk_numel(const TensorSpec& spec) const;
  void adopt_on_drives(int64_t index, const TensorStore::Tensor& tensor, const std::byte* weights);
  bool is_loaded(int64_t index, size_t chunk) const;
  AdamShard load(int64_t index, const TensorStore::Tensor& tensor, size_t chunk);
  void move(const Loaded& chunk, std::span<const SwapPiece> pieces, bool writes);

  size_t slot_bytes_;
  size_t update_slots_;
  size_t next_slot_ = 0;  // of the next update
  HostArena arena_;
  std::vector<std::vector<Chunk>> chunks_;  // by tensor; empty where drives have no part
  std::vector<int64_t> versions_;           // by tensor: what its chunks hold
  std::vector<std::string> names_;          // by tensor
  std::optional<Loaded> loaded_;
  std::vector<std::shared_ptr<WeightSpace>> spaces_;  // of weights on drives
  std::unique_ptr<nvme::Swapper> swapper_;  // last: it ends before the memory that it moves
};

}  // namespace orlop
