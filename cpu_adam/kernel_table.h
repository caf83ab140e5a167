#pragma once

#include "cpu_adam/adam_kernel.h"
#include "orlop/types.h"

namespace orlop {

// The kernels of active_isa().
const CpuKernels& active_kernels();

// Throws Error(kUsage) for a dtype that gradients do not have.
GradFormat grad_format(DType dtype);

}  // namespace orlop
