#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/completion.h"
#include "nvme/aligned_memory.h"
#include "nvme/io_backend.h"
#include "nvme/io_queue.h"

namespace orlop::nvme {

// A fresh directory under `parent`, removed with all it holds.
class TempDir {
 public:
  explicit TempDir(const std::string& parent = ::testing::TempDir()) {
    std::string name = (std::filesystem::path(parent) / "orlop-test-XXXXXX").string();
    EXPECT_NE(::mkdtemp(name.data()), nullptr) << name << ": " << std::strerror(errno);
    path_ = name;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// Bytes that differ by position and by seed.
inline void fill_pattern(std::span<std::byte> data, uint64_t seed) {
  uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  size_t i = 0;
  for (; i + 8 <= data.size(); i += 8) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    std::memcpy(data.data() + i, &state, 8);
  }
  for (; i < data.size(); ++i) data[i] = static_cast<std::byte>(state >> (8 * (i % 8)));
}

// Compares every byte with fill_pattern's; tells the first wrong index and both values.
inline ::testing::AssertionResult has_pattern(std::span<const std::byte> data, uint64_t seed) {
  std::vector<std::byte> expected(data.size());
  fill_pattern(expected, seed);
  if (data.empty() || std::memcmp(data.data(), expected.data(), data.size()) == 0) {
    return ::testing::AssertionSuccess();
  }
  size_t i = 0;
  while (data[i] == expected[i]) ++i;
  return ::testing::AssertionFailure()
         << "first wrong byte " << i << " of " << data.size() << ": "
         << std::to_integer<int>(data[i]) << " instead of " << std::to_integer<int>(expected[i]);
}

// The message of the orlop::Error that `action` throws; empty (and a failure) when it throws none.
inline std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "no error was thrown";
  return "";
}

// Submits a transfer whose outcome is a Completion.
inline Completion<> start_transfer(IoQueue& queue, IoOp op, int fd, uint64_t offset,
                                   std::span<std::byte> data, int64_t priority = 0) {
  Completion<> outcome;
  Transfer transfer;
  transfer.op = op;
  transfer.fd = fd;
  transfer.offset = offset;
  transfer.data = data;
  transfer.alignment = 4096;
  transfer.priority = priority;
  transfer.operation = "test transfer";
  transfer.path = "the test file";
  transfer.done = [outcome](const std::exception_ptr& error) mutable {
    error ? outcome.set_error(error) : outcome.set_value();
  };
  queue.submit(std::move(transfer));
  return outcome;
}

// Waits until `counter` has reached `count`.
inline void wait_for(const std::atomic<int>& counter, int count) {
  while (counter.load() < count) std::this_thread::sleep_for(std::chrono::microseconds(100));
}

inline std::string engine_name(IoEngine engine) {
  return engine == IoEngine::kUring ? "io_uring" : "threads";
}

// A backend of the given kind; skips the test where the machine has no io_uring.
#define ORLOP_MAKE_BACKEND_OR_SKIP(name, engine, depth)           \
  std::unique_ptr<::orlop::nvme::IoBackend> name;                 \
  try {                                                           \
    name = ::orlop::nvme::make_io_backend(engine, depth).backend; \
  } catch (const ::orlop::Error& error) {                         \
    GTEST_SKIP() << error.what();                                 \
  }

}  // namespace orlop::nvme
