#include "comm/host_communicator.h"

#include "base/check.h"
#include "base/half.h"

namespace orlop {
namespace {

template <typename Stored, typename Load, typename Store>
void sum_rows(std::span<const void* const> from, void* to, int64_t count, Load load, Store store) {
  auto* out = static_cast<Stored*>(to);
  for (int64_t i = 0; i < count; ++i) {
    auto sum = load(static_cast<const Stored*>(from[0])[i]);
    for (size_t r = 1; r < from.size(); ++r) sum += load(static_cast<const Stored*>(from[r])[i]);
    out[i] = store(sum);
  }
}

}  // namespace

const char* collective_name(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::kAllGather:
      return "all_gather";
    case CollectiveKind::kReduceScatter:
      return "reduce_scatter";
    case CollectiveKind::kBroadcast:
      return "broadcast";
    case CollectiveKind::kAllReduce:
      return "all_reduce";
    case CollectiveKind::kBarrier:
      return "barrier";
  }
  return "?";
}

void CollectiveCall::operator()() const { communicator->execute(*this); }

void HostCommunicator::issue(Queue& queue, CollectiveCall call) {
  check(call.count >= 0, ErrorCode::kCommunicator, "{} of {} elements", collective_name(call.kind),
        call.count);
  call.communicator = this;
  issue_(queue, call);
}

void HostCommunicator::all_gather(Queue& queue, const void* send, void* recv, int64_t count,
                                  DType dtype) {
  issue(queue, {.kind = CollectiveKind::kAllGather,
                .dtype = dtype,
                .count = count,
                .send = send,
                .recv = recv});
}

void HostCommunicator::reduce_scatter(Queue& queue, const void* send, void* recv, int64_t count,
                                      DType dtype) {
  check(is_summable(dtype), ErrorCode::kCommunicator,
        "reduce_scatter of {} values; only floating-point types are summed", dtype_name(dtype));
  issue(queue, {.kind = CollectiveKind::kReduceScatter,
                .dtype = dtype,
                .count = count,
                .send = send,
                .recv = recv});
}

void HostCommunicator::broadcast(Queue& queue, void* buffer, int64_t count, DType dtype, int root) {
  check(root >= 0 && root < world_size(), ErrorCode::kCommunicator,
        "broadcast from rank {} in a run with {} ranks", root, world_size());
  issue(queue, {.kind = CollectiveKind::kBroadcast,
                .dtype = dtype,
                .root = root,
                .count = count,
                .send = buffer,
                .recv = buffer});
}

bool is_summable(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF64 || dtype == DType::kBF16 ||
         dtype == DType::kF16;
}

void sum_in_order(std::span<const void* const> from, void* to, int64_t count, DType dtype) {
  const auto same = [](auto value) { return value; };
  switch (dtype) {
    case DType::kF32:
      return sum_rows<float>(from, to, count, same, same);
    case DType::kF64:
      return sum_rows<double>(from, to, count, same, same);
    case DType::kBF16:
      return sum_rows<uint16_t>(from, to, count, bf16_to_float, float_to_bf16);
    case DType::kF16:
      return sum_rows<uint16_t>(from, to, count, fp16_to_float, float_to_fp16);
    default:
      fail(ErrorCode::kInternal, "no sum over ranks of {} values", dtype_name(dtype));
  }
}

}  // namespace orlop
