#include "orlop/weight_drives.h"

#include <memory>
#include <utility>

#include "base/bytes.h"
#include "base/owner_process.h"
#include "engine/weight_space.h"
#include "zero/step_plan.h"

namespace orlop {

struct WeightDrives::Owner {
  explicit Owner(std::shared_ptr<WeightSpace> made)
      : space(std::make_unique<std::shared_ptr<WeightSpace>>(std::move(made))) {}
  // A forked child has neither the threads nor the memory: there the space is left alone.
  ~Owner() {
    if (!process.is_this()) static_cast<void>(space.release());
  }
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;

  // Every call passes here.
  std::shared_ptr<WeightSpace>& get() {
    process.check_this("set of weights on drives");
    return *space;
  }

  OwnerProcess process;
  std::unique_ptr<std::shared_ptr<WeightSpace>> space;
};

WeightDrives::WeightDrives(const StateDrives& drives)
    : owner_(std::make_unique<Owner>(std::make_shared<WeightSpace>(drives))) {}

WeightDrives::~WeightDrives() = default;

const std::shared_ptr<WeightSpace>& WeightDrives::space() const { return owner_->get(); }

int64_t WeightDrives::add(std::span<const DriveWeight> weights) {
  return owner_->get()->add(weights);
}

void WeightDrives::write(int64_t weight, std::span<const std::byte> values) {
  owner_->get()->write(weight, values);
}

void WeightDrives::read(int64_t weight, std::span<std::byte> values) {
  owner_->get()->read(weight, values);
}

void WeightDrives::take_slots(size_t count, size_t bytes) {
  owner_->get()->take_slots(count, bytes);
}

size_t WeightDrives::slot_bytes(std::span<const size_t> sizes) {
  size_t bytes = 0;
  for (const size_t each : sizes) bytes += align_up(each, kDriveAlignment);
  return bytes;
}

std::byte* WeightDrives::slot(size_t index) const { return owner_->get()->slot(index); }

uint32_t WeightDrives::fetch(std::span<const int64_t> weights, size_t slot, Fence free) {
  return owner_->get()->fetch(weights, slot, free);
}

const uint32_t* WeightDrives::fetched() const {
  return reinterpret_cast<const uint32_t*>(owner_->get()->fetched().value);
}

void WeightDrives::wait(uint32_t ticket) { owner_->get()->wait(ticket); }
void WeightDrives::synchronize() { owner_->get()->synchronize(); }

std::vector<std::span<std::byte>> WeightDrives::ranges() const { return owner_->get()->ranges(); }

}  // namespace orlop
