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
    std::byte* out = take(host.size() * sizeof(T));
    queue().upload(out, host.data(), host.size() * sizeof(T));
    queue().synchronize();
    return reinterpret_cast<T*>(out);
  }
  // All bits set: NaN in every floating dtype.
  std::byte* poisoned(size_t bytes) {
    std::byte* out = take(bytes);
    const std::vector<uint8_t> ones(std::min(bytes, kMiB), 0xff);
    repeat(out, ones, bytes);
    return out;
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
    std::byte* out = take(static_cast<size_t>(numel) * 2);
    repeat(out, period, static_cast<size_t>(numel) * 2);
    return out;
  }
  template <typename T>
  std::vector<T> get(const void* device, size_t count) {
    std::vector<T> out(count);
    queue().offload(out.data(), device, count * sizeof(T));
    queue().synchronize();
    return out;
  }

 private:
  template <typename T>
  void repeat(std::byte* device, const std::vector<T>& period, size_t bytes) {
    const size_t period_bytes = period.size() * sizeof(T);
    queue().upload(device, period.data(), std::min(bytes, period_bytes));
    for (size_t done = period_bytes; done < bytes;) {
      const size_t part = std::min(done, bytes - done);
      queue().copy_on_device(device + done, device, part);
      done += part;
    }
    queue().synchronize();
  }

  size_t used_ = 0;
};

}  // namespace orlop::test
