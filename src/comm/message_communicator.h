#pragma once

#include <array>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "comm/exchange.h"
#include "comm/host_communicator.h"
#include "comm/peers.h"
#include "comm/transport.h"

namespace orlop {

struct MessageOptions {
  HostCommunicator::Issue issue = nullptr;
  // A collective that a rank does not join for so long has failed, though the rank is alive.
  double timeout_seconds = 1800;
  // A rank that gives no sign of life for so long is dead. Signs are sent by a thread of their own,
  // also while the rank computes.
  double silence_seconds = 15;
};

// Ranks that reach each other by messages, for devices whose memory the CPU reads and writes. A
// thread of its own ("comm") makes and uses the transport; the others hand it their collectives and
// wait. It drives all channels at the same time, so that one may be waiting for a rank that is
// still in another.
class MessageCommunicator final : public HostCommunicator {
 public:
  // The lanes that a transport must have: one per channel, and one for news of the ranks.
  static constexpr int kLanes = static_cast<int>(kChannels) + 1;

  using MakeTransport = std::function<std::unique_ptr<Transport>()>;

  // Returns when `make` has, on the thread "comm"; throws what that throws.
  MessageCommunicator(const MessageOptions& options, const MakeTransport& make);
  // Tells the others that this rank leaves; after an orderly run waits for them.
  ~MessageCommunicator() override;

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  void execute(const CollectiveCall& call, Channel channel) override;
  void abort(const std::string& reason) noexcept override;
  std::string failure() const override;

 private:
  // A collective that a thread has handed over and waits for.
  struct Post {
    const CollectiveCall* call = nullptr;
    bool taken = false;  // the comm thread has started it
  };
  using Exchanges = std::array<Exchange, kChannels>;

  void run(const MakeTransport& make);
  void drive(Exchanges& exchanges, Peers& peers);
  bool take_posts(Exchanges& exchanges);
  bool advance(size_t channel, Exchange& exchange, const Peers& peers);
  void check_missing(size_t channel, const Exchange& exchange, const Peers& peers) const;
  void leave(Peers& peers);
  bool is_leaving() const;
  void report(const std::string& error);

  const MessageOptions options_;
  int rank_ = 0;
  int world_size_ = 1;
  std::unique_ptr<Transport> transport_;
  mutable std::mutex mutex_;
  std::condition_variable done_;  // to those who wait
  std::array<Post, kChannels> posts_;
  bool started_ = false;
  std::exception_ptr start_error_;
  bool leaving_ = false;
  std::string error_;    // the first; every call throws it
  std::string aborted_;  // what abort() was told
  std::thread thread_;
};

}  // namespace orlop
