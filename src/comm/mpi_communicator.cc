#include "comm/mpi_communicator.h"

#include <algorithm>
#include <atomic>

#include "base/check.h"
#include "base/log.h"
#include "base/thread.h"

namespace orlop {
namespace {

// A rank that has failed stays so long at most for the others to hear why.
constexpr std::chrono::seconds kFarewell{3};
// Polling while a collective is under way, and while nothing is.
constexpr std::chrono::microseconds kBusyPause{20};
constexpr std::chrono::milliseconds kIdlePause{50};

std::atomic<bool> mpi_was_started{false};

bool is_active(const MpiExchange& exchange) { return exchange.active(); }

}  // namespace

MpiCommunicator::MpiCommunicator(const MpiOptions& options) : HostCommunicator(options.issue) {
  check(!mpi_was_started.exchange(true), ErrorCode::kCommunicator,
        "MPI can be started once per process only; use one process per run");
  thread_ = start_thread("comm", [this, options] { run(options); });
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return started_ || !error_.empty(); });
  if (started_) return;
  lock.unlock();
  thread_.join();
  fail(ErrorCode::kCommunicator, "{}", error_);
}

MpiCommunicator::~MpiCommunicator() {
  {
    std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  handed_over_.notify_one();
  thread_.join();
}

void MpiCommunicator::execute(const CollectiveCall& call, Channel channel) {
  Post& post = posts_[static_cast<size_t>(channel)];
  std::unique_lock lock(mutex_);
  if (error_.empty()) {
    ORLOP_INVARIANT(post.call == nullptr);
    post = {&call, false};
    handed_over_.notify_one();
    done_.wait(lock, [&] { return post.call == nullptr || !error_.empty(); });
    if (post.call == nullptr) return;
    post = {};
  }
  fail(ErrorCode::kCommunicator, "{}", error_);
}

void MpiCommunicator::abort(const std::string& reason) noexcept {
  {
    std::lock_guard lock(mutex_);
    if (aborted_.empty()) aborted_ = fmt::format("rank {} has failed: {}", rank_, reason);
  }
  handed_over_.notify_one();
}

std::string MpiCommunicator::failure() const {
  std::lock_guard lock(mutex_);
  return error_;
}

void MpiCommunicator::run(const MpiOptions& options) {
  try {
    start_mpi();
    Exchanges exchanges{MpiExchange(MPI_COMM_WORLD), MpiExchange(MPI_COMM_WORLD),
                        MpiExchange(MPI_COMM_WORLD)};
    MpiPeers peers(MPI_COMM_WORLD, options.silence_seconds);
    {
      std::lock_guard lock(mutex_);
      started_ = true;
    }
    done_.notify_all();
    try {
      drive(options, exchanges, peers);
    } catch (const std::exception& error) {
      for (MpiExchange& exchange : exchanges) exchange.abandon();
      report(error.what());
      peers.tell_failed(error.what());
    }
    leave(peers);
  } catch (const std::exception& error) {
    report(error.what());
  }
}

void MpiCommunicator::start_mpi() {
  int provided = 0;
  // Only this thread ever calls MPI.
  check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided), "MPI_Init_thread");
  check(provided >= MPI_THREAD_FUNNELED, ErrorCode::kCommunicator,
        "this MPI does not allow calls from a thread (level {})", provided);
  check_mpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
  MPI_Comm_size(MPI_COMM_WORLD, &world_size_);
}

// Runs until this rank leaves. Throws the first error of the run.
void MpiCommunicator::drive(const MpiOptions& options, Exchanges& exchanges, MpiPeers& peers) {
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      const auto has_news = [&] {
        bool posted = leaving_ || !aborted_.empty();
        for (const Post& post : posts_) posted = posted || (post.call != nullptr && !post.taken);
        return posted;
      };
      const bool busy = std::any_of(exchanges.begin(), exchanges.end(), is_active);
      if (busy) {
        handed_over_.wait_for(lock, kBusyPause, has_news);
      } else {
        handed_over_.wait_for(lock, kIdlePause, has_news);
      }
      check(aborted_.empty(), ErrorCode::kCommunicator, "{}", aborted_);
      if (leaving_ && !busy) return;
      for (size_t i = 0; i < kChannels; ++i) {
        if (posts_[i].call == nullptr || posts_[i].taken) continue;
        posts_[i].taken = true;
        exchanges[i].start(*posts_[i].call);
      }
    }
    bool finished = false;
    for (size_t i = 0; i < kChannels; ++i) {
      finished = advance(options, i, exchanges[i], peers) || finished;
    }
    if (finished) done_.notify_all();
    if (const auto reason = peers.progress()) fail(ErrorCode::kCommunicator, "{}", *reason);
  }
}

// True when the channel's collective has just ended.
bool MpiCommunicator::advance(const MpiOptions& options, size_t channel, MpiExchange& exchange,
                              const MpiPeers& peers) {
  if (!exchange.active()) return false;
  if (!exchange.progress()) {
    check_missing(options, exchange, peers);
    return false;
  }
  std::lock_guard lock(mutex_);
  posts_[channel] = {};
  return true;
}

void MpiCommunicator::check_missing(const MpiOptions& options, const MpiExchange& exchange,
                                    const MpiPeers& peers) const {
  const std::vector<int> missing = exchange.missing();
  for (const int rank : missing) {
    check(!peers.left(rank), ErrorCode::kCommunicator,
          "rank {} has left the run; rank {} waits in {}", rank, rank_, exchange.description());
  }
  const std::chrono::duration<double> waited = MpiClock::now() - exchange.started();
  check(waited.count() <= options.timeout_seconds, ErrorCode::kCommunicator,
        "rank {} has waited {:.0f} s in {} for rank{} {}", rank_, waited.count(),
        exchange.description(), missing.size() == 1 ? "" : "s", fmt::join(missing, ", "));
}

// In good order all ranks leave together and MPI ends. After a failure others may be dead: MPI is
// left as it is, the launcher clears up.
void MpiCommunicator::leave(MpiPeers& peers) {
  const auto wait_until_leaving = [this] {
    std::unique_lock lock(mutex_);
    return handed_over_.wait_for(lock, kIdlePause, [this] { return leaving_; });
  };
  const bool in_order = [this] {
    std::lock_guard lock(mutex_);
    return error_.empty();
  }();
  while (!wait_until_leaving()) peers.progress();
  if (in_order) peers.tell_left();
  const MpiClock::time_point begin = MpiClock::now();
  while (!peers.all_gone() && (in_order || MpiClock::now() - begin < kFarewell)) {
    if (const auto reason = peers.progress(); reason && in_order) {
      log_warning("while leaving the run: {}", *reason);
      return;
    }
    std::this_thread::sleep_for(kBusyPause);
  }
  if (in_order && peers.all_left()) check_mpi(MPI_Finalize(), "MPI_Finalize");
}

void MpiCommunicator::report(const std::string& error) {
  {
    std::lock_guard lock(mutex_);
    if (error_.empty()) error_ = error;
  }
  done_.notify_all();
}

}  // namespace orlop

extern "C" __attribute__((visibility("default"))) orlop::HostCommunicator*
orlop_make_mpi_communicator(const orlop::MpiOptions* options) {
  return new orlop::MpiCommunicator(*options);
}
