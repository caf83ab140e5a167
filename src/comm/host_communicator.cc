#include "comm/host_communicator.h"

#include <algorithm>

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
    case CollectiveKind::kAllToAll:
      return "all_to_all";
    case CollectiveKind::kBroadcast:
      return "broadcast";
  }
  return "?";
}

CollectiveId make_collective_id(CollectiveKind kind, DType dtype, int64_t count, int root,
                                std::string_view what) {
  CollectiveId id{.kind = kind, .dtype = dtype, .root = root, .count = count, .what = {}};
  std::copy_n(what.begin(), std::min(what.size(), id.what.size() - 1), id.what.begin());
  return id;
}

std::string describe(const CollectiveId& id) {
  return fmt::format("{} of {} {} ({})", collective_name(id.kind), id.count, dtype_name(id.dtype),
                     id.what.data());
}

std::string disagreement(std::span<const CollectiveId> ids) {
  for (size_t rank = 1; rank < ids.size(); ++rank) {
    if (ids[rank] == ids[0]) continue;
    return fmt::format("the ranks have come apart: rank 0 calls {}, rank {} calls {}",
                       describe(ids[0]), rank, describe(ids[rank]));
  }
  return "";
}

void CollectiveCall::operator()() const {
  communicator->run(*this, HostCommunicator::Channel::kQueue);
}

std::string RecentCollectives::describe(int rank) const {
  if (completed_ == 0) return fmt::format("rank {} had completed no collective of its queue", rank);
  std::string text;
  for (uint64_t back = 0; back < std::min(completed_, kKept); ++back) {
    const std::string one = orlop::describe(ids_[(completed_ - 1 - back) % kKept]);
    if (back == 0) {
      text = fmt::format("rank {} had last completed {}, number {} of its queue", rank, one,
                         completed_);
    } else {
      text += (back == 1 ? ", after " : ", ") + one;
    }
  }
  return text;
}

void HostCommunicator::run(const CollectiveCall& call, Channel channel) {
  try {
    execute(call, channel);
  } catch (const Error& error) {
    std::lock_guard lock(completed_mutex_);
    fail(error.code(), "{}; {}", error.what(), completed_.describe(rank()));
  }
  if (channel != Channel::kQueue) return;
  std::lock_guard lock(completed_mutex_);
  completed_.add(call.id);
}

void HostCommunicator::issue(Queue& queue, CollectiveCall call) {
  check(call.id.count >= 0, ErrorCode::kCommunicator, "{} of {} elements",
        collective_name(call.id.kind), call.id.count);
  call.communicator = this;
  issue_(queue, call);
}

void HostCommunicator::check_root(int root) const {
  check(root >= 0 && root < world_size(), ErrorCode::kCommunicator,
        "broadcast from rank {} in a run with {} ranks", root, world_size());
}

void HostCommunicator::all_gather(Queue& queue, const void* send, void* recv, int64_t count,
                                  DType dtype, std::string_view what) {
  issue(queue, {make_collective_id(CollectiveKind::kAllGather, dtype, count, 0, what), send, recv});
}

void HostCommunicator::reduce_scatter(Queue& queue, const void* send, void* recv, int64_t count,
                                      DType dtype, std::string_view what) {
  check(is_summable(dtype), ErrorCode::kCommunicator,
        "reduce_scatter of {} values; only floating-point types are summed", dtype_name(dtype));
  issue(queue,
        {make_collective_id(CollectiveKind::kReduceScatter, dtype, count, 0, what), send, recv});
}

void HostCommunicator::all_to_all(Queue& queue, const void* send, void* recv, int64_t count,
                                  DType dtype, std::string_view what) {
  ORLOP_INVARIANT(send != recv || count == 0);
  issue(queue, {make_collective_id(CollectiveKind::kAllToAll, dtype, count, 0, what), send, recv});
}

void HostCommunicator::broadcast(Queue& queue, void* buffer, int64_t count, DType dtype, int root,
                                 std::string_view what) {
  check_root(root);
  issue(queue,
        {make_collective_id(CollectiveKind::kBroadcast, dtype, count, root, what), buffer, buffer});
}

void HostCommunicator::gather_on(Channel channel, std::span<const std::byte> send,
                                 std::span<std::byte> recv, std::string_view what) {
  ORLOP_INVARIANT(recv.size() == send.size() * static_cast<size_t>(world_size()));
  const int64_t count = static_cast<int64_t>(send.size());
  run({make_collective_id(CollectiveKind::kAllGather, DType::kU8, count, 0, what), send.data(),
       recv.data(), this},
      channel);
}

void HostCommunicator::broadcast_on(Channel channel, std::span<std::byte> values, int root,
                                    std::string_view what) {
  check_root(root);
  const int64_t count = static_cast<int64_t>(values.size());
  run({make_collective_id(CollectiveKind::kBroadcast, DType::kU8, count, root, what), values.data(),
       values.data(), this},
      channel);
}

void HostCommunicator::all_gather_values(std::span<const std::byte> send, std::span<std::byte> recv,
                                         std::string_view what) {
  gather_on(Channel::kHost, send, recv, what);
}

void HostCommunicator::broadcast_values(std::span<std::byte> values, int root,
                                        std::string_view what) {
  broadcast_on(Channel::kHost, values, root, what);
}

// The ranks as the second thread has them.
class HostCommunicator::Beside final : public Communicator {
 public:
  explicit Beside(HostCommunicator& ranks) : ranks_(ranks) {}

  int rank() const override { return ranks_.rank(); }
  int world_size() const override { return ranks_.world_size(); }
  void all_gather(Queue&, const void*, void*, int64_t, DType, std::string_view what) override {
    refuse(what);
  }
  void reduce_scatter(Queue&, const void*, void*, int64_t, DType, std::string_view what) override {
    refuse(what);
  }
  void all_to_all(Queue&, const void*, void*, int64_t, DType, std::string_view what) override {
    refuse(what);
  }
  void broadcast(Queue&, void*, int64_t, DType, int, std::string_view what) override {
    refuse(what);
  }
  void all_gather_values(std::span<const std::byte> send, std::span<std::byte> recv,
                         std::string_view what) override {
    ranks_.gather_on(Channel::kBeside, send, recv, what);
  }
  void broadcast_values(std::span<std::byte> values, int root, std::string_view what) override {
    ranks_.broadcast_on(Channel::kBeside, values, root, what);
  }
  Communicator& beside() override { return *this; }
  void abort(const std::string& reason) noexcept override { ranks_.abort(reason); }
  std::string failure() const override { return ranks_.failure(); }

 private:
  [[noreturn]] static void refuse(std::string_view what) {
    fail(ErrorCode::kInternal, "a collective of a queue ({}) beside the thread that issues", what);
  }

  HostCommunicator& ranks_;
};

HostCommunicator::HostCommunicator(Issue issue)
    : issue_(issue), beside_(std::make_unique<Beside>(*this)) {}
HostCommunicator::~HostCommunicator() = default;

Communicator& HostCommunicator::beside() { return *beside_; }

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
