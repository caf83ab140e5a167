#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/tensor_drives.h"
#include "engine/tensor_store.h"
#include "orlop/tensor_optimizer.h"

namespace orlop {

// The states of caller-owned tensors, in host memory and on drives, as others than the update see
// them. Used by one thread at a time, which makes sure that nothing of the tensor is under way.
class TensorHomes {
 public:
  explicit TensorHomes(const StateDrives& drives)
      : drives_(drives.nvme.paths.empty() ? nullptr : std::make_unique<TensorDrives>(drives)) {}

  TensorStore& store() { return store_; }
  const TensorStore& store() const { return store_; }
  TensorDrives* drives() { return drives_.get(); }  // null: there are none
  // Whether the states of a tensor are on drives.
  bool on_drives(const TensorStore::Tensor& tensor) const {
    return drives_ != nullptr && TensorDrives::hold(tensor.spec);
  }

  // Throws Error(kUsage) for states on drives that there are not. With states on drives nothing of
  // any tensor may be under way.
  int64_t add(std::span<const TensorSpec> specs);
  static bool want_drives(std::span<const TensorSpec> specs);

  void adopt_weights(int64_t index, const void* weights);
  void move_weights(int64_t index, void* weights);
  void read_master(int64_t index, std::span<float> values);
  void write_master(int64_t index, std::span<const float> values);
  void read_state(int64_t index, StatePlane plane, int64_t first, std::span<std::byte> values);
  void write_state(int64_t index, StatePlane plane, int64_t first,
                   std::span<const std::byte> values);
  int64_t piece_numel(int64_t index, int64_t first) const;

  // Brings to the drives what was changed.
  void settle() {
    if (drives_ != nullptr) drives_->settle();
  }

  std::vector<std::span<std::byte>> ranges() const;
  std::vector<TensorMemory> memory_report() const;

 private:
  void visit(int64_t index, int64_t first, int64_t numel, const TensorDrives::Use& use);
  void visit_master(int64_t index, const TensorDrives::Use& use);

  TensorStore store_;
  std::unique_ptr<TensorDrives> drives_;
};

}  // namespace orlop
