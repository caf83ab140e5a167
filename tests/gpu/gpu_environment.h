#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>

#include "gpu/cuda_backend.h"

namespace orlop::test {

// One CudaBackend for a whole test program: contexts, libraries and attention graphs are made once.
// At the end it asserts that the device's memory in use never left what info() promised.
class GpuEnvironment : public testing::Environment {
 public:
  explicit GpuEnvironment(size_t arena_bytes) : arena_bytes_(arena_bytes) {}

  void SetUp() override;
  void TearDown() override;

  // Null without a GPU, or when the GPU has less memory than the arena needs.
  CudaBackend* backend() { return backend_.get(); }
  std::byte* arena() { return arena_; }
  size_t arena_bytes() const { return arena_bytes_; }
  const std::string& missing() const { return missing_; }

 private:
  size_t arena_bytes_;
  std::byte* arena_ = nullptr;
  std::unique_ptr<CudaBackend> backend_;
  std::string missing_;
};

// The program's environment, made by the file that holds its tests.
GpuEnvironment& gpu();

// A Backend over the shared one whose arena is the shared arena again: null without a GPU.
std::unique_ptr<Backend> make_shared_backend();

}  // namespace orlop::test

#define SKIP_WITHOUT_GPU() \
  if (::orlop::test::gpu().backend() == nullptr) GTEST_SKIP() << ::orlop::test::gpu().missing()
