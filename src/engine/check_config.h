#pragma once

#include "model/transformer_config.h"
#include "orlop/config.h"

namespace orlop {

// Throws Error(kUsage) that names field, value and what it may be. Placement, budgets and the
// device are checked by those who use them.
void check_config(const EngineConfig& config, const TransformerConfig& model);

}  // namespace orlop
