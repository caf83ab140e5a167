// liborlop_cuda.so as a program meets it: loaded on demand, with and without a GPU.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "backend/backend.h"
#include "base/bytes.h"
#include "gpu/cuda_backend_api.h"
#include "orlop/error.h"

namespace orlop::test {
namespace {

using testing::HasSubstr;

struct Library {
  OrlopMakeCudaBackend make = nullptr;
  OrlopCudaDeviceCount count = nullptr;
};

// Stays loaded until the process ends.
Library load() {
  void* handle = dlopen(ORLOP_CUDA_LIBRARY, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) throw std::runtime_error(dlerror());
  return {reinterpret_cast<OrlopMakeCudaBackend>(dlsym(handle, "orlop_make_cuda_backend")),
          reinterpret_cast<OrlopCudaDeviceCount>(dlsym(handle, "orlop_cuda_device_count"))};
}

// The error that making a backend ends with, as "code: text".
std::string error_of(const CudaBackendOptions& options) {
  try {
    const std::unique_ptr<Backend> backend(load().make(&options));
    return "none";
  } catch (const Error& error) {
    return std::to_string(static_cast<int>(error.code())) + ": " + error.what();
  }
}

std::string code(ErrorCode code) { return std::to_string(static_cast<int>(code)) + ": "; }

TEST(GpuLibrary, ExportsItsFunctionsAndNothingElse) {
  const Library library = load();
  ASSERT_NE(library.make, nullptr);
  ASSERT_NE(library.count, nullptr);
  void* handle = dlopen(ORLOP_CUDA_LIBRARY, RTLD_NOW | RTLD_LOCAL);
  EXPECT_EQ(dlsym(handle, "cudaMalloc"), nullptr) << "the CUDA runtime inside would shadow others";
}

TEST(GpuLibrary, SaysThatThereIsNoGpu) {
  if (load().count() > 0)
    GTEST_SKIP() << "this machine has a GPU; gpu_library_hidden_test hides it";
  const std::string error = error_of({});
  EXPECT_THAT(error, HasSubstr(code(ErrorCode::kDevice)));
  EXPECT_THAT(error, HasSubstr("--device host"));
}

TEST(GpuLibrary, MakesABackend) {
  const Library library = load();
  if (library.count() == 0) GTEST_SKIP() << "no GPU";
  const CudaBackendOptions options;
  const std::unique_ptr<Backend> backend(library.make(&options));
  const DeviceInfo info = backend->info();
  EXPECT_FALSE(info.is_host);
  EXPECT_THAT(info.name, HasSubstr("NVIDIA"));
  EXPECT_GT(info.overhead_bytes, size_t{0});
  EXPECT_LT(info.overhead_bytes, info.total_bytes / 8);
  EXPECT_LE(info.free_bytes, info.total_bytes);
}

TEST(GpuLibrary, RefusesABadIndex) {
  const int32_t count = load().count();
  if (count == 0) GTEST_SKIP() << "no GPU";
  for (const int32_t index : {count, 99, -1}) {
    const std::string error = error_of({.device_index = index});
    EXPECT_THAT(error, HasSubstr(code(ErrorCode::kUsage)));
    EXPECT_THAT(error, HasSubstr("device index " + std::to_string(index)));
  }
}

TEST(GpuLibrary, RefusesABudgetBelowItsOverhead) {
  if (load().count() == 0) GTEST_SKIP() << "no GPU";
  const std::string error = error_of({.device_bytes = size_t{8} << 20});
  EXPECT_THAT(error, HasSubstr(code(ErrorCode::kDoesNotFit)));
  EXPECT_THAT(error, HasSubstr(format_bytes(size_t{8} << 20)));
}

// Backends one after the other give all memory back.
TEST(GpuLibrary, GivesItsMemoryBack) {
  const Library library = load();
  if (library.count() == 0) GTEST_SKIP() << "no GPU";
  size_t free_bytes = 0;
  for (int i = 0; i < 5; ++i) {
    const CudaBackendOptions options;
    const std::unique_ptr<Backend> backend(library.make(&options));
    const DeviceInfo info = backend->info();
    backend->allocate_arena(size_t{1} << 30);
    if (i == 1) free_bytes = info.free_bytes;
    if (i > 1) {
      EXPECT_GE(info.free_bytes + (size_t{16} << 20), free_bytes) << "round " << i;
    }
  }
}

}  // namespace
}  // namespace orlop::test
