#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "base/bytes.h"
#include "base/half.h"
#include "gpu_environment.h"

namespace orlop::test {

// Hands out the shared arena from its begin on, and fills it.
class DeviceData {
 public:
  Queue& queue() { return gpu().backend()->queue(QueueKind::kCompute); }
  Ops& ops() { return gpu().backend()->ops(); }

  std::byte* take(size_t bytes) {
    std::byte* out = gpu().arena() + used_;
    used_ = align_up(used_ + bytes, kDeviceAlignment);
    if (used_ > gpu().arena_bytes()) throw std::length_error("the test's arena is too small");
    return out;
  }
  template <typename T>
  T* put(const std::vector<T>& host) {
    return reinterpret_cast<T*>(put_bytes(host.data(), host.size() * sizeof(T)));
  }
  // `bytes` of host memory, `offset` bytes behind an aligned address.
  std::byte* put_bytes(const void* host, size_t bytes, size_t offset = 0) {
    std::byte* out = take(bytes + offset) + offset;
    queue().upload(out, host, bytes);
    queue().synchronize();
    return out;
  }
  // `bytes` in which the period comes again and again.
  template <typename T>
  std::byte* repeated(const std::vector<T>& period, size_t bytes) {
    std::byte* out = take(bytes);
    const size_t period_bytes = period.size() * sizeof(T);
    queue().upload(out, period.data(), std::min(bytes, period_bytes));
    for (size_t done = period_bytes; done < bytes;) {
      const size_t part = std::min(done, bytes - done);
      queue().copy_on_device(out + done, out, part);
      done += part;
    }
    queue().synchronize();
    return out;
  }
  // All bits set: NaN in every floating dtype.
  std::byte* poisoned(size_t bytes) {
    return repeated(std::vector<uint8_t>(std::min(bytes, kMiB), 0xff), bytes);
  }
  // bf16 values in (-deviation, deviation) that repeat after 2^20 + 7 elements.
  std::byte* random_bf16(int64_t numel, float deviation, uint64_t seed) {
    std::vector<uint16_t> period(static_cast<size_t>(std::min<int64_t>(numel, (1 << 20) + 7)));
    uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
    for (uint16_t& value : period) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      const float unit = static_cast<float>(state >> 40) * 0x1p-23f - 1.0f;
      value = float_to_bf16(unit * deviation);
    }
    return repeated(period, static_cast<size_t>(numel) * 2);
  }
  template <typename T>
  std::vector<T> get(const void* device, size_t count) {
    std::vector<T> out(count);
    queue().offload(out.data(), device, count * sizeof(T));
    queue().synchronize();
    return out;
  }

  template <typename T>
  T get_one(const T* device) {
    return get<T>(device, 1)[0];
  }

  // Hands the arena out from its begin again.
  void reset() { used_ = 0; }

 private:
  size_t used_ = 0;
};

}  // namespace orlop::test
