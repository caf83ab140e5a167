// What NCCL does for the first time: it takes memory and makes connections then, and where they do
// not work, no step has begun.
#include <functional>

#include "base/check.h"
#include "gpu/cuda_stream.h"
#include "gpu/device_buffer.h"
#include "gpu/device_scope.h"
#include "gpu/nccl_communicator.h"

namespace orlop {
namespace {

// Floats of a rank: more than small messages' protocols carry.
constexpr size_t kCount = size_t{1} << 18;
constexpr int64_t kNumel = int64_t{kCount};

void copy_to(const DeviceBuffer& buffer, const std::vector<float>& values) {
  ORLOP_CUDA(cudaMemcpy(buffer.data(), values.data(), values.size() * sizeof(float),
                        cudaMemcpyHostToDevice));
}

void expect_value(const std::vector<float>& values, size_t begin, float want, const char* what) {
  for (size_t i = begin; i < begin + kCount; ++i) {
    check(values[i] == want, ErrorCode::kCommunicator,
          "NCCL's first {} give {} instead of {} at element {}", what, values[i], want, i);
  }
}

}  // namespace

// Does what all ranks do before the first step; when it fails on one, none of them waits for it.
void NcclCommunicator::start(const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& error) {
    {
      std::lock_guard lock(mutex_);
      if (ended_) throw;
    }
    fail(ErrorCode::kCommunicator, "{}", give_up(error));
  }
}

// Ends the collectives of this rank, tells the others, and returns why: what another rank has told,
// or the error and where to look.
std::string NcclCommunicator::give_up(const std::exception& error) {
  std::string reason = host_.failure();
  if (reason.empty()) {
    reason = fmt::format(
        "{}; NCCL_DEBUG=INFO tells more. In a container, look at the size of its shared memory "
        "(/dev/shm)",
        error.what());
    host_.abort(reason);
  }
  std::lock_guard lock(mutex_);
  end_collectives();
  return reason;
}

// Runs `issue` on a stream and returns the `numel` floats of `result` when that is over. After an
// error nothing is on the device any more, so that its memory can be freed.
std::vector<float> NcclCommunicator::first(const char* what, const void* result, size_t numel,
                                           const std::function<void(cudaStream_t)>& issue) {
  const CudaStream stream(0);
  try {
    {
      std::lock_guard lock(mutex_);
      check(!ended_, ErrorCode::kCommunicator, "{}", host_.failure());
      issue(stream.get());
    }
    const CudaEvent end(device_);
    ORLOP_CUDA(cudaEventRecord(end.get(), stream.get()));
    const Clock::time_point begin = Clock::now();
    while (!end.query()) {
      const std::string failure = host_.failure();
      check(Clock::now() - begin < timeout_ && failure.empty(), ErrorCode::kCommunicator,
            "NCCL's first {} do not end; {}", what,
            failure.empty() ? "they have run into the time limit" : failure);
      std::this_thread::sleep_for(kPollInterval);
    }
    std::vector<float> values(numel);
    ORLOP_CUDA(cudaMemcpy(values.data(), result, numel * sizeof(float), cudaMemcpyDeviceToHost));
    return values;
  } catch (const std::exception& error) {
    fail(ErrorCode::kCommunicator, "{}", give_up(error));
  }
}

// Makes NCCL take its memory and its connections before the budget of the device is measured, and
// shows that what arrives is what was sent.
void NcclCommunicator::warm_up() {
  const size_t ranks = static_cast<size_t>(world_size());
  const size_t self = static_cast<size_t>(rank());
  std::vector<float> values(ranks * kCount, static_cast<float>(self + 1));
  const DeviceBuffer buffer(values.size() * sizeof(float));
  copy_to(buffer, values);
  float* all = static_cast<float*>(buffer.data());
  float* own = all + self * kCount;
  values = first("collectives", own, kCount, [&](cudaStream_t stream) {
    settle(nccl_.all_gather(own, all, kCount, ncclFloat32, comm_, stream), "first all_gather");
    settle(nccl_.reduce_scatter(all, own, kCount, ncclFloat32, ncclSum, comm_, stream),
           "first reduce_scatter");
  });
  expect_value(values, 0, static_cast<float>(ranks * (self + 1)), "collectives");
}

// Messages between two ranks go over connections of their own, which have memory of their own.
void NcclCommunicator::prepare_all_to_all() {
  const DeviceScope scope(device_);
  start([this] { exchange_first(); });
}

void NcclCommunicator::exchange_first() {
  const size_t ranks = static_cast<size_t>(world_size());
  const auto value = [&](size_t from, size_t to) { return static_cast<float>(from * ranks + to); };
  std::vector<float> values;
  for (size_t to = 0; to < ranks; ++to) {
    values.insert(values.end(), kCount, value(static_cast<size_t>(rank()), to));
  }
  const DeviceBuffer send(values.size() * sizeof(float));
  const DeviceBuffer recv(values.size() * sizeof(float));
  copy_to(send, values);
  const CollectiveId id =
      make_collective_id(CollectiveKind::kAllToAll, DType::kF32, kNumel, 0, "first");
  values = first("messages", recv.data(), values.size(), [&](cudaStream_t stream) {
    settle(exchange_rows(send.data(), recv.data(), id, stream), "first all_to_all");
  });
  for (size_t from = 0; from < ranks; ++from) {
    expect_value(values, from * kCount, value(from, static_cast<size_t>(rank())), "messages");
  }
}

}  // namespace orlop
