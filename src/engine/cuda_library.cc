#include "engine/cuda_library.h"

#include <fmt/format.h>

#include <string_view>

namespace orlop {
namespace {

constexpr std::string_view kCudaVersion = ORLOP_CUDA_VERSION;

}  // namespace

SharedLibrary load_cuda_library(const std::string& name) {
  SharedLibrary library(name);
  const bool is_absent = library.error().starts_with(name);
  if (library.loaded()) {
    library.require_version("orlop_cuda_version", ORLOP_VERSION);
  } else if (!is_absent) {  // what it needs is
    library.explain(
        fmt::format(" (this build is for CUDA {}: install PyTorch for CUDA {} beside it, whose "
                    "libraries it takes, or "
                    "that toolkit, where the loader looks, see LD_LIBRARY_PATH)",
                    kCudaVersion, kCudaVersion.substr(0, kCudaVersion.find('.'))));
  }
  return library;
}

}  // namespace orlop
