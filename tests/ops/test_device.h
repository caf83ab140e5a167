#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/ops.h"

namespace orlop::test {

// Values are doubles on the test's side and `dtype` on the device's.
using Values = std::vector<double>;

// What `dtype` makes of the values: what a reference must compute with.
Values rounded(const Values& values, DType dtype);

// `numel` values of a normal distribution, rounded to `dtype`.
Values random_values(std::mt19937_64& random, int64_t numel, DType dtype, double deviation = 1.0);

// A backend with one arena from which tensors are handed out, each aligned as a plan aligns them.
// All work goes to the compute queue.
class TestDevice {
 public:
  explicit TestDevice(std::unique_ptr<Backend> backend, size_t arena_bytes = size_t{48} << 20);

  Backend& backend() { return *backend_; }
  Ops& ops() { return backend_->ops(); }
  Queue& queue() { return backend_->queue(QueueKind::kCompute); }

  void* put(const Values& values, DType dtype);
  template <typename T>
  T* put_raw(const std::vector<T>& values) {
    return static_cast<T*>(put_bytes(values.data(), values.size() * sizeof(T)));
  }
  float* put_f32(const Values& values) { return static_cast<float*>(put(values, DType::kF32)); }
  // All bits set: NaN in every dtype, so that an element that is read or not written shows.
  void* poisoned(int64_t numel, DType dtype);
  void* poisoned_bytes(size_t bytes);

  // Waits for the queue.
  Values get(const void* device, int64_t numel, DType dtype);
  template <typename T>
  std::vector<T> get_raw(const void* device, int64_t count) {
    std::vector<T> result(static_cast<size_t>(count));
    get_bytes(result.data(), device, result.size() * sizeof(T));
    return result;
  }

 private:
  void* take(size_t bytes);
  void* put_bytes(const void* host, size_t bytes);
  void get_bytes(void* host, const void* device, size_t bytes);

  std::unique_ptr<Backend> backend_;
  std::byte* arena_ = nullptr;
  size_t arena_bytes_ = 0;
  size_t used_ = 0;
};

// ||actual - expected|| <= tolerance * ||expected|| (Frobenius), all finite; a failure names the
// worst element.
void expect_close(const Values& actual, const Values& expected, double tolerance,
                  const std::string& what);

}  // namespace orlop::test
