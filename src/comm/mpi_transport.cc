#include "comm/mpi_transport.h"

#include <algorithm>
#include <atomic>

#include "base/check.h"
#include "comm/mpi_api.h"

namespace orlop {
namespace {

constexpr size_t kMaxMessageBytes = size_t{1} << 30;
// Between two looks of one who is hurried.
constexpr std::chrono::microseconds kHurriedPause{20};
constexpr int kTag = 1;

std::atomic<bool> mpi_was_started{false};

void check_mpi(int result, const char* call) {
  if (result == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(result, text, &length);
  fail(ErrorCode::kCommunicator, "{}: {}", call, text);
}

}  // namespace

MpiTransport::MpiTransport(int lanes) {
  check(!mpi_was_started.exchange(true), ErrorCode::kCommunicator,
        "MPI can be started once per process only; use one process per run");
  int provided = 0;
  check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided), "MPI_Init_thread");
  check(provided >= MPI_THREAD_FUNNELED, ErrorCode::kCommunicator,
        "this MPI does not allow calls from a thread (level {})", provided);
  check_mpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
  MPI_Comm_size(MPI_COMM_WORLD, &world_size_);
  for (int lane = 0; lane < lanes; ++lane) {
    MPI_Comm comm = MPI_COMM_NULL;
    check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &comm), "MPI_Comm_dup");
    check_mpi(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    lanes_.push_back(comm);
  }
}

Transport::Request MpiTransport::take_slot(bool is_receive) {
  if (free_.empty()) {
    free_.push_back(static_cast<Request>(slots_.size()));
    slots_.emplace_back();
  }
  const Request request = free_.back();
  free_.pop_back();
  Slot& slot = slots_[static_cast<size_t>(request)];
  slot.pieces.clear();
  slot.is_receive = is_receive;
  slot.is_free = false;
  return request;
}

// `call` issues one piece.
template <typename Bytes, typename Call>
Transport::Request MpiTransport::start(Bytes* data, size_t bytes, bool is_receive,
                                       const Call& call) {
  const Request request = take_slot(is_receive);
  std::vector<MPI_Request>& pieces = slots_[static_cast<size_t>(request)].pieces;
  for (size_t left = bytes; left > 0;) {
    const size_t piece = std::min(left, kMaxMessageBytes);
    call(data, static_cast<int>(piece), &pieces.emplace_back(MPI_REQUEST_NULL));
    data += piece;
    left -= piece;
  }
  return request;
}

Transport::Request MpiTransport::send(int to, int lane, const void* data, size_t bytes) {
  const MPI_Comm comm = lanes_[static_cast<size_t>(lane)];
  return start(static_cast<const std::byte*>(data), bytes, false,
               [&](const std::byte* piece, int count, MPI_Request* request) {
                 check_mpi(MPI_Isend(piece, count, MPI_BYTE, to, kTag, comm, request), "MPI_Isend");
               });
}

Transport::Request MpiTransport::receive(int from, int lane, void* data, size_t bytes) {
  const MPI_Comm comm = lanes_[static_cast<size_t>(lane)];
  return start(static_cast<std::byte*>(data), bytes, true,
               [&](std::byte* piece, int count, MPI_Request* request) {
                 check_mpi(MPI_Irecv(piece, count, MPI_BYTE, from, kTag, comm, request),
                           "MPI_Irecv");
               });
}

bool MpiTransport::test(Request request) {
  Slot& slot = slots_[static_cast<size_t>(request)];
  ORLOP_INVARIANT(!slot.is_free);
  for (MPI_Request& piece : slot.pieces) {
    int done = 0;
    check_mpi(MPI_Test(&piece, &done, MPI_STATUS_IGNORE), "MPI_Test");  // a null one is done
    if (done == 0) return false;
  }
  slot.is_free = true;
  free_.push_back(request);
  return true;
}

// MPI withdraws receives only. The slot stays taken: what has not been withdrawn may still end.
void MpiTransport::cancel(Request request) noexcept {
  Slot& slot = slots_[static_cast<size_t>(request)];
  if (slot.is_free || !slot.is_receive) return;
  for (MPI_Request& piece : slot.pieces) {
    if (piece == MPI_REQUEST_NULL) continue;
    int done = 0;
    MPI_Cancel(&piece);
    MPI_Test(&piece, &done, MPI_STATUS_IGNORE);
  }
}

void MpiTransport::wait(std::chrono::milliseconds longest, bool hurried) {
  std::unique_lock lock(mutex_);
  const auto is_woken = [this] { return is_woken_; };
  if (hurried) {
    woken_.wait_for(lock, kHurriedPause, is_woken);
  } else {
    woken_.wait_for(lock, longest, is_woken);
  }
  is_woken_ = false;
}

void MpiTransport::wake() noexcept {
  {
    std::lock_guard lock(mutex_);
    is_woken_ = true;
  }
  woken_.notify_one();
}

void MpiTransport::finish() { check_mpi(MPI_Finalize(), "MPI_Finalize"); }

}  // namespace orlop

extern "C" __attribute__((visibility("default"))) orlop::Transport* orlop_make_mpi_transport(
    int lanes) {
  return new orlop::MpiTransport(lanes);
}
