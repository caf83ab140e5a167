#pragma once

#include <cstddef>

#include "comm/communicator.h"

namespace orlop {

// The run with one rank: a collective is a copy, or nothing when it works in place.
class SingleCommunicator final : public Communicator {
 public:
  // Issues a copy on the queue: Queue::copy_on_device, handed in because the interfaces below know
  // no queue.
  using Copy = void (*)(Queue& queue, void* to, const void* from, size_t bytes);

  explicit SingleCommunicator(Copy copy) : copy_(copy) {}

  int rank() const override { return 0; }
  int world_size() const override { return 1; }
  void all_gather(Queue& queue, const void* send, void* recv, int64_t count, DType dtype,
                  std::string_view what) override;
  void reduce_scatter(Queue& queue, const void* send, void* recv, int64_t count, DType dtype,
                      std::string_view what) override;
  void all_to_all(Queue& queue, const void* send, void* recv, int64_t count, DType dtype,
                  std::string_view what) override;
  void broadcast(Queue& queue, void* buffer, int64_t count, DType dtype, int root,
                 std::string_view what) override;
  void all_gather_values(std::span<const std::byte> send, std::span<std::byte> recv,
                         std::string_view what) override;
  void broadcast_values(std::span<std::byte> values, int root, std::string_view what) override;
  Communicator& beside() override { return *this; }
  void abort(const std::string&) noexcept override {}
  std::string failure() const override { return ""; }

 private:
  Copy copy_;
};

}  // namespace orlop
