#pragma once

#include "optim/grad_scaler.h"
#include "optim/lr_schedule.h"
#include "orlop/config.h"

namespace orlop {

// What a configuration says to the parts of src/optim.
LrScheduleConfig schedule_config(const EngineConfig& config);
GradScalerConfig scaler_config(const EngineConfig& config);

}  // namespace orlop
