#include "comm/message_communicator.h"

#include <algorithm>

#include "base/check.h"
#include "base/log.h"
#include "base/thread.h"

namespace orlop {
namespace {

using Clock = Transport::Clock;

// A rank that has failed stays so long at most for the others to hear why.
constexpr std::chrono::seconds kFarewell{3};
// A rank that speaks for so long after one of its lanes has ended is not about to end itself.
constexpr std::chrono::seconds kLaneIsBroken{3};
// How often the ranks are looked at while nothing moves.
constexpr std::chrono::milliseconds kIdlePause{50};
constexpr int kNewsLane = MessageCommunicator::kLanes - 1;

bool is_active(const Exchange& exchange) { return exchange.active(); }

}  // namespace

MessageCommunicator::MessageCommunicator(const MessageOptions& options, const MakeTransport& make)
    : HostCommunicator(options.issue), options_(options) {
  thread_ = start_thread("comm", [this, &make] { run(make); });
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return started_ || start_error_; });
  if (started_) return;
  lock.unlock();
  thread_.join();
  std::rethrow_exception(start_error_);
}

MessageCommunicator::~MessageCommunicator() {
  {
    std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  transport_->wake();
  thread_.join();
}

void MessageCommunicator::execute(const CollectiveCall& call, Channel channel) {
  Post& post = posts_[static_cast<size_t>(channel)];
  std::unique_lock lock(mutex_);
  if (error_.empty()) {
    ORLOP_INVARIANT(post.call == nullptr);
    post = {&call, false};
    transport_->wake();
    done_.wait(lock, [&] { return post.call == nullptr || !error_.empty(); });
    if (post.call == nullptr) return;
    post = {};
  }
  fail(ErrorCode::kCommunicator, "{}", error_);
}

void MessageCommunicator::abort(const std::string& reason) noexcept {
  {
    std::lock_guard lock(mutex_);
    if (aborted_.empty()) aborted_ = fmt::format("rank {} has failed: {}", rank_, reason);
  }
  transport_->wake();
}

std::string MessageCommunicator::failure() const {
  std::lock_guard lock(mutex_);
  return error_;
}

void MessageCommunicator::run(const MakeTransport& make) {
  try {
    transport_ = make();
  } catch (...) {
    std::lock_guard lock(mutex_);
    start_error_ = std::current_exception();
    done_.notify_all();
    return;
  }
  rank_ = transport_->rank();
  world_size_ = transport_->world_size();
  {
    std::lock_guard lock(mutex_);
    started_ = true;
    done_.notify_all();
  }
  try {
    Exchanges exchanges{Exchange(*transport_, 0), Exchange(*transport_, 1),
                        Exchange(*transport_, 2)};
    Peers peers(*transport_, kNewsLane, options_.silence_seconds);
    try {
      drive(exchanges, peers);
    } catch (const std::exception& error) {
      for (Exchange& exchange : exchanges) exchange.abandon();
      report(error.what());
      peers.tell_failed(error.what());
    }
    leave(peers);
  } catch (const std::exception& error) {
    report(error.what());
  }
}

// Runs until this rank leaves. Throws the first error of the run.
void MessageCommunicator::drive(Exchanges& exchanges, Peers& peers) {
  while (take_posts(exchanges)) {
    bool finished = false;
    for (size_t i = 0; i < kChannels; ++i) {
      finished = advance(i, exchanges[i], peers) || finished;
    }
    if (finished) done_.notify_all();
    if (const auto reason = peers.progress()) fail(ErrorCode::kCommunicator, "{}", *reason);
    transport_->wait(kIdlePause, std::any_of(exchanges.begin(), exchanges.end(), is_active));
  }
}

// Starts what has been handed over; false when this rank is to leave and nothing is under way.
bool MessageCommunicator::take_posts(Exchanges& exchanges) {
  std::lock_guard lock(mutex_);
  check(aborted_.empty(), ErrorCode::kCommunicator, "{}", aborted_);
  for (size_t i = 0; i < kChannels; ++i) {
    if (posts_[i].call == nullptr || posts_[i].taken) continue;
    posts_[i].taken = true;
    exchanges[i].start(*posts_[i].call);
  }
  return !leaving_ || std::any_of(exchanges.begin(), exchanges.end(), is_active);
}

// True when the channel's collective has just ended.
bool MessageCommunicator::advance(size_t channel, Exchange& exchange, const Peers& peers) {
  if (!exchange.active()) return false;
  if (!exchange.progress()) {
    check_missing(channel, exchange, peers);
    return false;
  }
  std::lock_guard lock(mutex_);
  posts_[channel] = {};
  return true;
}

void MessageCommunicator::check_missing(size_t channel, const Exchange& exchange,
                                        const Peers& peers) const {
  const std::vector<int> missing = exchange.missing();
  for (const int rank : missing) {
    check(!peers.left(rank), ErrorCode::kCommunicator,
          "rank {} has left the run; rank {} waits in {}", rank, rank_, exchange.description());
    // When its process has died, the news of it say so before.
    const auto lost = transport_->lost_since(rank, static_cast<int>(channel));
    check(!lost || Clock::now() - *lost < kLaneIsBroken, ErrorCode::kCommunicator,
          "the connection to rank {} has broken, though its process lives; rank {} waits in {}",
          rank, rank_, exchange.description());
  }
  const std::chrono::duration<double> waited = Clock::now() - exchange.started();
  check(waited.count() <= options_.timeout_seconds, ErrorCode::kCommunicator,
        "rank {} has waited {:.0f} s in {} for rank{} {}", rank_, waited.count(),
        exchange.description(), missing.size() == 1 ? "" : "s", fmt::join(missing, ", "));
}

bool MessageCommunicator::is_leaving() const {
  std::lock_guard lock(mutex_);
  return leaving_;
}

// In good order all ranks leave together and the transport ends. After a failure others may be
// dead: the transport is left as it is.
void MessageCommunicator::leave(Peers& peers) {
  const bool in_order = failure().empty();
  while (!is_leaving()) {
    peers.progress();
    transport_->wait(kIdlePause, false);
  }
  if (in_order) peers.tell_left();
  const Clock::time_point begin = Clock::now();
  while (!(peers.all_gone() && peers.told()) && (in_order || Clock::now() - begin < kFarewell)) {
    if (const auto reason = peers.progress(); reason && in_order) {
      log_warning("while leaving the run: {}", *reason);
      return;
    }
    transport_->wait(kIdlePause, true);
  }
  if (in_order && peers.all_left()) transport_->finish();
}

void MessageCommunicator::report(const std::string& error) {
  {
    std::lock_guard lock(mutex_);
    if (error_.empty()) error_ = error;
  }
  done_.notify_all();
}

}  // namespace orlop
