#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "orlop/config.h"
#include "orlop/cpu_adam.h"
#include "orlop/export.h"
#include "orlop/types.h"

// Adam for tensors that somebody else's training loop owns: what stands behind the PyTorch doors.
namespace orlop {

class WeightDrives;

struct TensorSpec {
  std::string name;                  // for messages
  DType dtype = DType::kF32;         // of the weights: F32, BF16 or F16
  DType moment_dtype = DType::kF32;  // F32, or BF16 with stochastic rounding
  int64_t numel = 0;
  // The caller's weights in host memory (numel, aligned to their elements, valid until the
  // optimizer is gone); updates write them in place. For F32 they are the master itself. Null:
  // Orlop keeps a host copy, whose first content is what adopt_weights() gives.
  void* weights = nullptr;
  bool keep_gradient = false;  // take room for one gradient of `dtype` in host memory
  uint64_t seed = 0;           // of stochastic rounding
  // Moments, and what of the master the weights do not hold, live on the optimizer's drives.
  bool on_drives = false;
  // The weights too live on drives, as weight `drive_weight` of these, where they are what the
  // master begins with: `weights` is null and on_drives true. An update brings them in and writes
  // them back.
  std::shared_ptr<WeightDrives> weight_drives{};
  int64_t drive_weight = 0;
};

// The drives behind states that host memory does not hold: files in nvme.paths, one for each
// directory, which no other process may use; they go with the optimizer. Their chunks pass through
// slots of host memory, of which one belongs to reads and writes between updates.
struct StateDrives {
  NvmeConfig nvme;                             // no paths: no drives
  size_t slot_bytes = size_t{16} << 20;        // of one chunk's states; a multiple of 4096
  size_t host_bytes = 5 * (size_t{16} << 20);  // of all slots: at least three
};

// The arrays of a tensor's states beside its weights.
enum class StatePlane : uint8_t {
  kExpAvg,
  kExpAvgSq,
  kMasterRest  // bf16: the lo plane, fp16: the fp32 master; fp32 has none
};

// Where the states of one tensor lie, all in host memory, numel elements each; null for what its
// layout lacks (AdamShard tells the layouts) and what is on drives. exp_avg and exp_avg_sq hold
// moment_dtype.
struct TensorStates {
  void* weights = nullptr;  // bf16 and fp16: the compute copy; fp32: the master
  uint16_t* lo = nullptr;
  float* master = nullptr;  // fp16 alone
  void* exp_avg = nullptr;
  void* exp_avg_sq = nullptr;
  void* gradient = nullptr;
  // Becomes the version that update() returned once the tensor is written, kFailedVersion after a
  // failure. In the same memory, so that a device can wait for it.
  const uint32_t* written_version = nullptr;
};

inline constexpr uint32_t kFailedVersion = 0x7fffffffu;

// What the optimizer's thread waits for before it reads a gradient: `wait(handle)` returns 0 when
// the gradient has arrived and anything else when it never will.
struct Fence {
  int (*wait)(void*) = nullptr;  // null: it is there already
  void* handle = nullptr;
};

struct GradientView {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t numel = 0;
};

// Sum of squares over several gradients, each summed as grad_square_sum() does, added in their
// order; first_tensor is the position of the first with a NaN or Inf, or -1.
struct GradientNorm {
  double square_sum = 0;
  int64_t first_tensor = -1;
  int64_t first_element = -1;
};

struct TensorUpdate {
  int64_t tensor = 0;
  GradientView gradient;  // valid until the update has been waited for
  AdamHyper hyper;        // `seed` is ignored: it is the tensor's
  Fence arrived;
  // Of fp16: whether somebody else may have written weights or master in place since the last
  // update; the master is brought up to that first, which is a pass over both.
  bool is_written = true;
};

// A run of host memory and what it is held for.
struct TensorMemory {
  std::string purpose;
  size_t bytes = 0;
};

// Owns masters and moments of tensors in host memory that grows with add(), and runs their updates
// on a thread of its own, in the order of the calls. Called by one thread at a time. The first
// failure of an update is thrown by the next call that waits or submits, and by all after it. In a
// forked child every call throws and the destructor does nothing. All errors are orlop::Error.
class ORLOP_EXPORT TensorOptimizer {
 public:
  // `threads` drive each update; 0: default_threads(). Errors of drives name path and numbers:
  // Error(kUsage) for a directory that cannot be used, Error(kDoesNotFit) for one that is full,
  // Error(kIo) for a transfer that failed, after which all that was submitted has ended.
  explicit TensorOptimizer(int threads = 0, const StateDrives& drives = {});
  // Ends what was submitted.
  ~TensorOptimizer();
  TensorOptimizer(const TensorOptimizer&) = delete;
  TensorOptimizer& operator=(const TensorOptimizer&) = delete;

  // Takes memory, and space on the drives, for the states of `tensors`, moments zero, and returns
  // the index of the first; the others follow. All or nothing. Throws Error(kDoesNotFit) with the
  // shortage.
  int64_t add(std::span<const TensorSpec> tensors);

  // Gives the states of a tensor up, once what was submitted for it has run; no call may name it
  // from then on. Their memory goes back with the last tensor of its add(), when nobody holds
  // memory() of any; space on drives with the optimizer.
  void release(int64_t tensor);

  // The memory behind the states of a tensor; stays as long as somebody holds it, also when the
  // optimizer is gone.
  std::shared_ptr<const void> memory(int64_t tensor) const;
  TensorStates states(int64_t tensor) const;

  GradientNorm norm(std::span<const GradientView> gradients);

  // Submits one update of each of the given tensors, in that order, and returns at once. Every
  // gradient is first multiplied by grad_scale. `step` is for messages. Returns the version that
  // the tensors' written_version becomes. Throws before anything changes for an argument that
  // cannot work.
  uint32_t update(std::span<const TensorUpdate> updates, float grad_scale, int64_t step);

  // Submits: `sum` becomes, or with `add` grows by, the kept gradient of the tensor; with `last`
  // round_sum() follows in the same pass. Returns the version that written_version becomes, as
  // update() does.
  uint32_t accumulate(int64_t tensor, std::span<float> sum, bool add, bool last, Fence arrived);

  // Submits: the kept gradient becomes `sum`, rounded to nearest even, and is measured.
  uint32_t round_sum(int64_t tensor, std::span<float> sum);

  // Submits the norms of the kept gradients of these tensors, which are there when `arrived` says
  // so: they are known when the last gradient arrives.
  uint32_t measure(std::span<const int64_t> tensors, Fence arrived);

  // What the last round_sum() or measure() of the tensor found. Waits for it.
  GradientNorm measured(int64_t tensor);

  // Waits for what was submitted for one tensor / for all.
  void wait(int64_t tensor);
  void synchronize();

  // Takes weights (numel elements of the tensor's dtype) that somebody else changed: the next
  // update starts there. Where they differ the master becomes exactly them; in bf16 its rest stays,
  // at most half a unit in the last place. Waits for updates.
  void adopt_weights(int64_t tensor, const void* weights);

  // The caller's weights lie elsewhere from now on, with the same dtype and count, and are taken as
  // adopt_weights() takes them. The old memory may be gone. Waits for updates.
  void move_weights(int64_t tensor, void* weights);

  // The fp32 master. Writing it also writes the weights (bf16: round half up, fp16: nearest even).
  // Both wait for updates.
  void read_master(int64_t tensor, std::span<float> values);
  void write_master(int64_t tensor, std::span<const float> values);

  // Elements [first, first + values.size() / element size) of one plane as they are kept, wherever
  // that is. Both wait for updates.
  void read_state(int64_t tensor, StatePlane plane, int64_t first, std::span<std::byte> values);
  void write_state(int64_t tensor, StatePlane plane, int64_t first,
                   std::span<const std::byte> values);

  // How many elements from `first` on lie together: reads and writes of all planes of such a piece,
  // one after the other, move it from its drive and back once.
  int64_t piece_numel(int64_t tensor, int64_t first) const;

  // Every range of host memory that a device may want to pin, since weights, gradients and versions
  // are there, not masters and moments: page-aligned address and bytes.
  std::vector<std::span<std::byte>> ranges() const;

  // Bytes by purpose, over all tensors, and of the slots of the drives.
  std::vector<TensorMemory> memory_report() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace orlop
