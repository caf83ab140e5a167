#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "orlop/export.h"
#include "orlop/tensor_optimizer.h"

namespace orlop {

class WeightSpace;

struct DriveWeight {
  std::string name;  // for messages
  size_t bytes = 0;  // at least one
};

// Weights of a model that host memory does not hold: files in the directories of `drives`, which no
// other process may use and which go with the last owner. A block's weights come together into one
// of a few slots of host memory, ahead of their use, on a thread of their own. Called by one thread
// at a time. Errors are orlop::Error and name weight, path and offset; after one of a fetch every
// later fetch throws it. In a forked child every call throws and the destructor does nothing.
class ORLOP_EXPORT WeightDrives {
 public:
  // Makes the files. A chunk of a weight is a seventh of drives.slot_bytes, so that a slot of an
  // optimizer over the same `drives` holds it with its states; drives.host_bytes is the
  // optimizer's. Throws Error(kUsage) for a directory that cannot be used.
  explicit WeightDrives(const StateDrives& drives);
  ~WeightDrives();
  WeightDrives(const WeightDrives&) = delete;
  WeightDrives& operator=(const WeightDrives&) = delete;

  // Takes space and returns the index of the first; the others follow. All or nothing. Throws
  // Error(kDoesNotFit) with the bytes missing.
  int64_t add(std::span<const DriveWeight> weights);

  // Copy a whole weight to and from the drives, piece by piece. Both wait for its last update.
  void write(int64_t weight, std::span<const std::byte> values);
  void read(int64_t weight, std::span<std::byte> values);

  // Takes host memory for `count` slots, each for weights of slot_bytes(sizes) together.
  void take_slots(size_t count, size_t bytes);
  // Of weights that lie one after the other, each at a multiple of 4096, given the bytes of each.
  static size_t slot_bytes(std::span<const size_t> sizes);
  std::byte* slot(size_t index) const;

  // Submits: these weights, as their last update makes them, come into a slot, once `free` says
  // that what was there is not read any more. Returns the ticket that *fetched() reaches when they
  // are there, in the order of the calls; kFailedVersion after an error.
  uint32_t fetch(std::span<const int64_t> weights, size_t slot, Fence free);
  const uint32_t* fetched() const;  // in the slots' memory, so that a device can wait for it
  void wait(uint32_t ticket);
  void synchronize();

  // Host memory that a device may want to pin: page-aligned address and bytes.
  std::vector<std::span<std::byte>> ranges() const;

  // For an optimizer whose updates change these weights on their drives.
  const std::shared_ptr<WeightSpace>& space() const;

 private:
  struct Owner;
  std::unique_ptr<Owner> owner_;
};

}  // namespace orlop
