#include "gpu/nccl_communicator.h"

#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "base/thread.h"
#include "gpu/cuda_queue.h"
#include "gpu/device_scope.h"

namespace orlop {
namespace {

constexpr std::chrono::milliseconds kWatchInterval{50};

ncclDataType_t nccl_type(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return ncclFloat64;
    case DType::kF32:
      return ncclFloat32;
    case DType::kBF16:
      return ncclBfloat16;
    case DType::kF16:
      return ncclFloat16;
    case DType::kI64:
      return ncclInt64;
    case DType::kI32:
      return ncclInt32;
    case DType::kI16:
      break;
    case DType::kI8:
      return ncclInt8;
    case DType::kU8:
    case DType::kBool:
      return ncclUint8;
  }
  fail(ErrorCode::kCommunicator, "NCCL moves no {} values", dtype_name(dtype));
}

}  // namespace

NcclCommunicator::NcclCommunicator(int device, Communicator& host, double timeout_seconds)
    : device_(device), host_(host), timeout_(timeout_seconds) {
  const DeviceScope scope(device_);
  start([this] {
    connect();
    warm_up();
  });
  watchdog_ = start_thread("nccl", [this] { watch(); });
}

NcclCommunicator::~NcclCommunicator() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stopped_.notify_one();
  watchdog_.join();
  if (host_.failure().empty()) {
    try {
      const DeviceScope scope(device_);
      settle(nccl_.comm_finalize(comm_), "ncclCommFinalize");
      if (nccl_.comm_destroy(comm_) != ncclSuccess) log_warning("ncclCommDestroy has failed");
      return;
    } catch (const std::exception& error) {
      log_warning("while leaving the run: {}", error.what());
    }
  }
  end_collectives();
}

// NCCL's own way to find the other ranks starts from 128 bytes that rank 0 makes.
void NcclCommunicator::connect() {
  ncclUniqueId id{};
  if (host_.rank() == 0) settle(nccl_.get_unique_id(&id), "ncclGetUniqueId");
  host_.broadcast_values(std::as_writable_bytes(std::span(&id, 1)), 0, "NCCL's id");
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;  // a rank that dies meanwhile must not keep this one inside a call
  const ncclResult_t result =
      nccl_.comm_init_rank_config(&comm_, host_.world_size(), id, host_.rank(), &config);
  settle(result, "ncclCommInitRankConfig");
}

// This rank's own row is copied; the others go directly, all at the same time.
ncclResult_t NcclCommunicator::exchange_rows(const void* send, void* recv, const CollectiveId& id,
                                             cudaStream_t stream) {
  const size_t bytes = static_cast<size_t>(id.count) * dtype_bytes(id.dtype);
  ORLOP_CUDA(cudaMemcpyAsync(row_of(recv, rank(), id), row_of(send, rank(), id), bytes,
                             cudaMemcpyDeviceToDevice, stream));
  ncclResult_t result = nccl_.group_start();
  const auto add = [&](ncclResult_t one) {
    if (one != ncclSuccess && one != ncclInProgress) result = one;
  };
  for (int other = 0; other < world_size(); ++other) {
    if (other == rank()) continue;
    add(nccl_.send(row_of(send, other, id), bytes, ncclUint8, other, comm_, stream));
    add(nccl_.recv(row_of(recv, other, id), bytes, ncclUint8, other, comm_, stream));
  }
  const ncclResult_t ended = nccl_.group_end();
  return result == ncclSuccess ? ended : result;
}

void NcclCommunicator::all_gather(Queue& queue, const void* send, void* recv, int64_t count,
                                  DType dtype, std::string_view what) {
  issue(queue, make_collective_id(CollectiveKind::kAllGather, dtype, count, 0, what),
        [&](cudaStream_t stream) {
          return nccl_.all_gather(send, recv, static_cast<size_t>(count), nccl_type(dtype), comm_,
                                  stream);
        });
}

void NcclCommunicator::reduce_scatter(Queue& queue, const void* send, void* recv, int64_t count,
                                      DType dtype, std::string_view what) {
  check(is_summable(dtype), ErrorCode::kCommunicator,
        "reduce_scatter of {} values; only floating-point types are summed", dtype_name(dtype));
  issue(queue, make_collective_id(CollectiveKind::kReduceScatter, dtype, count, 0, what),
        [&](cudaStream_t stream) {
          return nccl_.reduce_scatter(send, recv, static_cast<size_t>(count), nccl_type(dtype),
                                      ncclSum, comm_, stream);
        });
}

void NcclCommunicator::all_to_all(Queue& queue, const void* send, void* recv, int64_t count,
                                  DType dtype, std::string_view what) {
  if (count == 0) return;
  const CollectiveId id = make_collective_id(CollectiveKind::kAllToAll, dtype, count, 0, what);
  issue(queue, id, [&](cudaStream_t stream) { return exchange_rows(send, recv, id, stream); });
}

void NcclCommunicator::broadcast(Queue& queue, void* buffer, int64_t count, DType dtype, int root,
                                 std::string_view what) {
  check(root >= 0 && root < world_size(), ErrorCode::kCommunicator,
        "broadcast from rank {} in a run with {} ranks", root, world_size());
  issue(queue, make_collective_id(CollectiveKind::kBroadcast, dtype, count, root, what),
        [&](cudaStream_t stream) {
          return nccl_.broadcast(buffer, buffer, static_cast<size_t>(count), nccl_type(dtype), root,
                                 comm_, stream);
        });
}

template <typename Call>
void NcclCommunicator::issue(Queue& queue, const CollectiveId& id, const Call& call) {
  CudaQueue& on = cuda_queue(queue);
  const cudaStream_t stream = on.stream();
  const DeviceScope scope(device_);
  std::lock_guard lock(mutex_);
  check(!ended_, ErrorCode::kCommunicator, "{}; {}", host_.failure(), completed_.describe(rank()));
  {
    const QueueTrace::Span span(on.trace(), collective_name(id.kind));
    settle(call(stream), describe(id));
  }
  std::unique_ptr<CudaEvent> end = take_event();
  ORLOP_CUDA(cudaEventRecord(end->get(), stream));
  issued_.push_back({id, std::move(end), Clock::now()});
}

std::unique_ptr<CudaEvent> NcclCommunicator::take_event() {
  if (free_events_.empty()) return std::make_unique<CudaEvent>(device_);
  std::unique_ptr<CudaEvent> event = std::move(free_events_.back());
  free_events_.pop_back();
  return event;
}

// Waits until NCCL has taken a call in; with a blocking of its own it could not be left.
void NcclCommunicator::settle(ncclResult_t result, const std::string& what) {
  const Clock::time_point begin = Clock::now();
  while (result == ncclInProgress) {
    std::this_thread::sleep_for(kPollInterval);
    const std::string failure = host_.failure();
    check(failure.empty(), ErrorCode::kCommunicator, "{}: {}", what, failure);
    check(Clock::now() - begin < timeout_, ErrorCode::kCommunicator,
          "{}: NCCL has not found all {} ranks within {:.0f} s", what, world_size(),
          timeout_.count());
    ncclResult_t asynchronous = ncclSuccess;
    const ncclResult_t asked = nccl_.comm_get_async_error(comm_, &asynchronous);
    result = asked == ncclSuccess ? asynchronous : asked;
  }
  check(result == ncclSuccess, ErrorCode::kCommunicator, "{}: {} ({})", what,
        nccl_.get_error_string(result), nccl_.get_last_error(comm_));
}

void NcclCommunicator::watch() {
  std::unique_lock lock(mutex_);
  while (!stopped_.wait_for(lock, kWatchInterval, [this] { return stop_; })) {
    if (ended_) continue;
    std::string failure;
    try {
      failure = find_failure();
    } catch (const std::exception& error) {
      failure = error.what();
    }
    if (failure.empty()) continue;
    host_.abort(failure);
    log_warning("collectives end ({}); {}", failure, completed_.describe(rank()));
    end_collectives();
  }
}

// Why the collectives cannot go on, or "". Forgets those that are over.
std::string NcclCommunicator::find_failure() {
  while (!issued_.empty() && issued_.front().end->query()) {
    free_events_.push_back(std::move(issued_.front().end));
    completed_.add(issued_.front().id);
    issued_.pop_front();
    if (!issued_.empty()) issued_.front().since = Clock::now();
  }
  if (std::string failure = host_.failure(); !failure.empty()) return failure;
  ncclResult_t asynchronous = ncclSuccess;
  const ncclResult_t asked = nccl_.comm_get_async_error(comm_, &asynchronous);
  const ncclResult_t result = asked == ncclSuccess ? asynchronous : asked;
  const std::string last = issued_.empty() ? "no collective" : describe(issued_.front().id);
  if (result != ncclSuccess && result != ncclInProgress) {
    return fmt::format("NCCL, in {}: {} ({}); {}", last, nccl_.get_error_string(result),
                       nccl_.get_last_error(comm_), completed_.describe(rank()));
  }
  if (!issued_.empty() && Clock::now() - issued_.front().since > timeout_) {
    return fmt::format("{} has not ended within {:.0f} s: a rank has not come to it; {}", last,
                       timeout_.count(), completed_.describe(rank()));
  }
  return "";
}

void NcclCommunicator::end_collectives() noexcept {
  if (ended_ || comm_ == nullptr) return;
  ended_ = true;
  const ncclResult_t result = nccl_.comm_abort(comm_);
  if (result != ncclSuccess) log_warning("ncclCommAbort: {}", nccl_.get_error_string(result));
}

}  // namespace orlop
