#include "faulty_backend.h"

#include <algorithm>
#include <array>
#include <thread>

#include "base/check.h"

namespace orlop::nvme {
namespace {

constexpr size_t kAlignment = 4096;
constexpr auto kPoll = std::chrono::microseconds(50);

}  // namespace

FaultyBackend::FaultyBackend(std::unique_ptr<IoBackend> inner, FaultPlan plan)
    : inner_(std::move(inner)), plan_(std::move(plan)) {}

size_t FaultyBackend::submit(std::span<const IoRequest> requests) {
  if (limit_) requests = requests.first(std::min(requests.size(), limit_(requests.size())));
  for (const IoRequest& request : requests) {
    const Pending pending{request, plan_(request, count_++)};
    IoRequest real = request;
    if (pending.fault.kind == Fault::kShort) {
      real.bytes = std::min(pending.fault.bytes, real.bytes) / kAlignment * kAlignment;
    }
    if (pending.fault.kind == Fault::kError) {
      hold(pending, -pending.fault.error);
    } else if (real.bytes == 0) {
      hold(pending, static_cast<int64_t>(pending.fault.bytes));
    } else {
      pending_.push_back(pending);
      while (inner_->submit({&real, 1}) == 0) {
        std::array<IoResult, 1> none;
        ORLOP_INVARIANT(inner_->reap(std::span(none).first(0), false) == 0);
      }
    }
  }
  return requests.size();
}

void FaultyBackend::hold(const Pending& pending, int64_t result) {
  held_.push_back({{pending.request.token, result}, Clock::now() + pending.fault.delay});
}

size_t FaultyBackend::reap(std::span<IoResult> results, bool wait) {
  std::array<IoResult, 64> raw;
  while (true) {
    const size_t got = inner_->reap(raw, wait && held_.empty());
    for (size_t i = 0; i < got; ++i) {
      const auto found = std::ranges::find_if(
          pending_, [&](const Pending& pending) { return pending.request.token == raw[i].token; });
      ORLOP_INVARIANT(found != pending_.end());
      int64_t result = raw[i].result;
      if (found->fault.kind == Fault::kShort && result > 0) {
        result = static_cast<int64_t>(found->fault.bytes);
      } else if (found->fault.kind == Fault::kFlip && result > 0) {
        found->request.data[found->fault.bytes] ^= std::byte{1};
      }
      hold(*found, result);
      pending_.erase(found);
    }
    size_t count = 0;
    const Clock::time_point now = Clock::now();
    std::erase_if(held_, [&](const Held& held) {
      if (count == results.size() || held.due > now) return false;
      results[count++] = held.result;
      return true;
    });
    if (count > 0 || !wait || woken_.exchange(false) || held_.empty()) return count;
    std::this_thread::sleep_for(kPoll);
  }
}

void FaultyBackend::wake() noexcept {
  woken_.store(true);
  inner_->wake();
}

}  // namespace orlop::nvme
