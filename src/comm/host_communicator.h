#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <string>

#include "comm/communicator.h"

namespace orlop {

class HostCommunicator;

enum class CollectiveKind : uint8_t { kAllGather, kReduceScatter, kAllToAll, kBroadcast };
const char* collective_name(CollectiveKind kind);

// What all ranks must agree on, as plain bytes.
struct CollectiveId {
  CollectiveKind kind = CollectiveKind::kAllGather;
  DType dtype = DType::kU8;
  int32_t root = 0;
  int64_t count = 0;
  std::array<char, 48> what{};  // ends with 0; cut when it is longer

  bool operator==(const CollectiveId&) const = default;
};

CollectiveId make_collective_id(CollectiveKind kind, DType dtype, int64_t count, int root,
                                std::string_view what);
// "all_gather of 10 F32 (layer.7)"
std::string describe(const CollectiveId& id);
// "rank 0 calls ..., rank 2 calls ..." about the first rank that differs from rank 0; "" when all
// agree.
std::string disagreement(std::span<const CollectiveId> ids);

// The collectives of a queue that a rank has completed last, for errors: where ranks stand apart,
// theirs tell where.
class RecentCollectives {
 public:
  static constexpr uint64_t kKept = 5;

  void add(const CollectiveId& id) { ids_[completed_++ % kKept] = id; }
  // "rank 1 had last completed all_gather of 10 F32 (layer.7), number 3 of its queue, after
  // all_gather of 10 F32 (layer.6), all_gather of 10 F32 (layer.5)"
  std::string describe(int rank) const;

 private:
  std::array<CollectiveId, kKept> ids_;
  uint64_t completed_ = 0;
};

// One collective of one rank, plain bytes so that a queue stores it without allocating. Running it
// waits for the other ranks.
struct CollectiveCall {
  CollectiveId id;
  const void* send = nullptr;
  void* recv = nullptr;
  HostCommunicator* communicator = nullptr;

  void operator()() const;
};

// The part of `buffer` (world_size, count) that belongs to `rank`.
inline const std::byte* row_of(const void* buffer, int rank, const CollectiveId& id) {
  const size_t bytes = static_cast<size_t>(id.count) * dtype_bytes(id.dtype);
  return static_cast<const std::byte*>(buffer) + static_cast<size_t>(rank) * bytes;
}
inline std::byte* row_of(void* buffer, int rank, const CollectiveId& id) {
  return const_cast<std::byte*>(row_of(static_cast<const void*>(buffer), rank, id));
}

// A communicator whose buffers the CPU reads and writes: its collectives become host work of the
// queue.
class HostCommunicator : public Communicator {
 public:
  // Makes `call` the next work of the queue; what it throws is the queue's error. Handed in because
  // this layer knows no queue.
  using Issue = void (*)(Queue& queue, const CollectiveCall& call);

  // A rank has at most one collective in flight per channel.
  enum class Channel : uint8_t { kQueue, kHost, kBeside };
  static constexpr size_t kChannels = 3;

  explicit HostCommunicator(Issue issue);
  ~HostCommunicator() override;

  void all_gather(Queue& queue, const void* send, void* recv, int64_t count, DType dtype,
                  std::string_view what) final;
  void reduce_scatter(Queue& queue, const void* send, void* recv, int64_t count, DType dtype,
                      std::string_view what) final;
  void all_to_all(Queue& queue, const void* send, void* recv, int64_t count, DType dtype,
                  std::string_view what) final;
  void broadcast(Queue& queue, void* buffer, int64_t count, DType dtype, int root,
                 std::string_view what) final;
  void all_gather_values(std::span<const std::byte> send, std::span<std::byte> recv,
                         std::string_view what) final;
  void broadcast_values(std::span<std::byte> values, int root, std::string_view what) final;

  Communicator& beside() final;

  // Runs a collective on the calling thread, with all ranks. An error says what this rank had
  // completed before.
  void run(const CollectiveCall& call, Channel channel);

 protected:
  // What run() runs.
  virtual void execute(const CollectiveCall& call, Channel channel) = 0;

 private:
  class Beside;

  void issue(Queue& queue, CollectiveCall call);
  void gather_on(Channel channel, std::span<const std::byte> send, std::span<std::byte> recv,
                 std::string_view what);
  void broadcast_on(Channel channel, std::span<std::byte> values, int root, std::string_view what);
  void check_root(int root) const;

  Issue issue_;
  std::unique_ptr<Beside> beside_;
  std::mutex completed_mutex_;
  RecentCollectives completed_;
};

// True for the types that sum_in_order() adds.
bool is_summable(DType dtype);

// to[i] = sum over `from`, in their order, of from[r][i]; the types of up to 32 bits in fp32 with
// one rounding. `to` may be one of `from`.
void sum_in_order(std::span<const void* const> from, void* to, int64_t count, DType dtype);

}  // namespace orlop
