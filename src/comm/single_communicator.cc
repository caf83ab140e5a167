#include "comm/single_communicator.h"

#include "base/check.h"

namespace orlop {

void SingleCommunicator::all_gather(Queue& queue, const void* send, void* recv, int64_t count,
                                    DType dtype) {
  if (send == recv || count == 0) return;
  copy_(queue, recv, send, static_cast<size_t>(count) * dtype_bytes(dtype));
}

void SingleCommunicator::reduce_scatter(Queue& queue, const void* send, void* recv, int64_t count,
                                        DType dtype) {
  all_gather(queue, send, recv, count, dtype);
}

void SingleCommunicator::broadcast(Queue&, void*, int64_t, DType, int root) {
  check(root == 0, ErrorCode::kCommunicator, "broadcast from rank {} in a run with one rank", root);
}

}  // namespace orlop
