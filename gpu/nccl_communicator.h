#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/host_communicator.h"
#include "gpu/cuda_event.h"
#include "gpu/nccl_api.h"

namespace orlop {

// The ranks of a run with one GPU each: collectives of device memory by NCCL, on the stream of the
// queue that they are given; everything else by the host communicator of the same ranks, which also
// knows when one of them dies. reduce_scatter sums in an order that is fixed by count, number of
// ranks and machine, not in that of the ranks; all_to_all, by messages between two ranks each,
// moves bytes as they are.
//
// A thread of its own ("nccl") watches what has been issued. An error of NCCL, a collective that
// does not end in time and a failure of the host communicator end all collectives of this rank, so
// that no queue waits for ever, and become the host communicator's error, which every rank is told
// and which its next call throws.
class NcclCommunicator final : public Communicator {
 public:
  // All ranks of `host`, which outlives this, make theirs together.
  NcclCommunicator(int device, Communicator& host, double timeout_seconds);
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;
  ~NcclCommunicator() override;

  int rank() const override { return host_.rank(); }
  int world_size() const override { return host_.world_size(); }
  void all_gather(Queue& queue, const void* send, void* recv, int64_t count, DType dtype,
                  std::string_view what) override;
  void reduce_scatter(Queue& queue, const void* send, void* recv, int64_t count, DType dtype,
                      std::string_view what) override;
  void all_to_all(Queue& queue, const void* send, void* recv, int64_t count, DType dtype,
                  std::string_view what) override;
  void prepare_all_to_all() override;
  void broadcast(Queue& queue, void* buffer, int64_t count, DType dtype, int root,
                 std::string_view what) override;
  void all_gather_values(std::span<const std::byte> send, std::span<std::byte> recv,
                         std::string_view what) override {
    host_.all_gather_values(send, recv, what);
  }
  void broadcast_values(std::span<std::byte> values, int root, std::string_view what) override {
    host_.broadcast_values(values, root, what);
  }
  Communicator& beside() override { return host_.beside(); }
  void abort(const std::string& reason) noexcept override { host_.abort(reason); }
  std::string failure() const override { return host_.failure(); }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::microseconds kPollInterval{50};

  // A collective that its stream has not reached the end of.
  struct Issued {
    CollectiveId id;
    std::unique_ptr<CudaEvent> end;
    Clock::time_point since;
  };

  void connect();
  void warm_up();
  void start(const std::function<void()>& work);
  std::string give_up(const std::exception& error);
  std::vector<float> first(const char* what, const void* result, size_t numel,
                           const std::function<void(cudaStream_t)>& issue);
  void exchange_first();
  ncclResult_t exchange_rows(const void* send, void* recv, const CollectiveId& id,
                             cudaStream_t stream);
  template <typename Call>
  void issue(Queue& queue, const CollectiveId& id, const Call& call);
  void settle(ncclResult_t result, const std::string& what);
  std::unique_ptr<CudaEvent> take_event();
  void watch();
  std::string find_failure();
  void end_collectives() noexcept;

  const int device_;
  Communicator& host_;
  const std::chrono::duration<double> timeout_;
  NcclApi nccl_;
  ncclComm_t comm_ = nullptr;

  std::mutex mutex_;  // of NCCL's communicator and of what follows
  std::condition_variable stopped_;
  bool stop_ = false;
  bool ended_ = false;  // the communicator is aborted
  std::deque<Issued> issued_;
  RecentCollectives completed_;
  std::vector<std::unique_ptr<CudaEvent>> free_events_;
  std::thread watchdog_;
};

}  // namespace orlop
