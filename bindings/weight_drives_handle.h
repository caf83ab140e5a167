#pragma once

#include <memory>
#include <utility>

#include "orlop/error.h"
#include "orlop/weight_drives.h"

namespace orlop::python {

// Weights on drives that Python can close; an optimizer over them keeps what it needs.
struct WeightDrivesHandle {
  explicit WeightDrivesHandle(std::shared_ptr<WeightDrives> made) : drives(std::move(made)) {}

  WeightDrives& get() const {
    if (!drives) throw Error(ErrorCode::kUsage, "these weights on drives were given up");
    return *drives;
  }

  std::shared_ptr<WeightDrives> drives;
};

}  // namespace orlop::python
