#pragma once

#include <string>

#include "base/shared_library.h"

namespace orlop {

// liborlop_cuda.so or liborlop_cuda_optimizer.so, which nothing links. error() says what is missing
// and, where CUDA or Orlop are of two versions, names both. The caller keeps it for the life of the
// process.
SharedLibrary load_cuda_library(const std::string& name);

}  // namespace orlop
