#pragma once

#include "base/shared_library.h"

namespace orlop {

// liborlop_cuda.so, which nothing links. error() says what is missing and, where CUDA or Orlop are
// of two versions, names both. The caller keeps it for the life of the process.
SharedLibrary load_cuda_library();

}  // namespace orlop
