#include "orlop/version.h"

namespace orlop {

const char* version() { return ORLOP_VERSION; }

}  // namespace orlop
