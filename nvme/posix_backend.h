#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "nvme/io_backend.h"

namespace orlop::nvme {

// Ordinary pread and pwrite on a few threads: for machines where io_uring is forbidden or missing.
class PosixBackend final : public IoBackend {
 public:
  explicit PosixBackend(unsigned threads);
  // Finishes what was accepted.
  ~PosixBackend() override;

  std::string_view name() const override { return "threads"; }
  size_t submit(std::span<const IoRequest> requests) override;
  size_t reap(std::span<IoResult> results, bool wait) override;
  void wake() noexcept override;

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable work_ready_;
  std::condition_variable result_ready_;
  std::deque<IoRequest> requests_;
  std::deque<IoResult> results_;
  bool woken_ = false;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace orlop::nvme
