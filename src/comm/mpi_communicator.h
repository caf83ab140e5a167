#pragma once

#include <array>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include "comm/mpi_api.h"
#include "comm/mpi_exchange.h"
#include "comm/mpi_peers.h"

namespace orlop {

// The ranks of an MPI run, for devices whose memory the CPU reads and writes. A thread of its own
// ("comm") makes every MPI call; the others hand it their collectives and wait. It drives both
// channels at the same time, so that one may be waiting for a rank that is still in the other.
class MpiCommunicator final : public HostCommunicator {
 public:
  explicit MpiCommunicator(const MpiOptions& options);
  // Tells the others that this rank leaves; after an orderly run waits for them and ends MPI.
  ~MpiCommunicator() override;

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
  using Exchanges = std::array<MpiExchange, kChannels>;

  void run(const MpiOptions& options);
  void start_mpi();
  void drive(const MpiOptions& options, Exchanges& exchanges, MpiPeers& peers);
  void leave(MpiPeers& peers);
  bool advance(const MpiOptions& options, size_t channel, MpiExchange& exchange,
               const MpiPeers& peers);
  void check_missing(const MpiOptions& options, const MpiExchange& exchange,
                     const MpiPeers& peers) const;
  void report(const std::string& error);

  int rank_ = 0;
  int world_size_ = 1;
  mutable std::mutex mutex_;
  std::condition_variable handed_over_;  // to the comm thread
  std::condition_variable done_;         // to those who wait
  std::array<Post, kChannels> posts_;
  bool started_ = false;
  bool leaving_ = false;
  std::string error_;    // the first; every call throws it
  std::string aborted_;  // what abort() was told
  std::thread thread_;
};

}  // namespace orlop
