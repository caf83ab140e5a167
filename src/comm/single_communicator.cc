#include "comm/single_communicator.h"

#include <algorithm>

#include "base/check.h"

namespace orlop {

void SingleCommunicator::all_gather(Queue& queue, const void* send, void* recv, int64_t count,
                                    DType dtype, std::string_view) {
  if (send == recv || count == 0) return;
  copy_(queue, recv, send, static_cast<size_t>(count) * dtype_bytes(dtype));
}

void SingleCommunicator::reduce_scatter(Queue& queue, const void* send, void* recv, int64_t count,
                                        DType dtype, std::string_view what) {
  all_gather(queue, send, recv, count, dtype, what);
}

void SingleCommunicator::all_to_all(Queue& queue, const void* send, void* recv, int64_t count,
                                    DType dtype, std::string_view what) {
  all_gather(queue, send, recv, count, dtype, what);
}

void SingleCommunicator::broadcast(Queue&, void*, int64_t, DType, int root, std::string_view) {
  check(root == 0, ErrorCode::kCommunicator, "broadcast from rank {} in a run with one rank", root);
}

void SingleCommunicator::all_gather_values(std::span<const std::byte> send,
                                           std::span<std::byte> recv, std::string_view) {
  ORLOP_INVARIANT(recv.size() == send.size());
  std::copy(send.begin(), send.end(), recv.begin());
}

void SingleCommunicator::broadcast_values(std::span<std::byte>, int root, std::string_view) {
  check(root == 0, ErrorCode::kCommunicator, "broadcast from rank {} in a run with one rank", root);
}

}  // namespace orlop
