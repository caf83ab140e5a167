#pragma once

#include "orlop/export.h"

namespace orlop {

// "0.1.0": the version of the library that is loaded.
ORLOP_EXPORT const char* version();

}  // namespace orlop
