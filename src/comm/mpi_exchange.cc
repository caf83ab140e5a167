#include "comm/mpi_exchange.h"

#include <algorithm>
#include <cstring>

#include "base/bytes.h"
#include "base/check.h"

namespace orlop {
namespace {

constexpr int kIdTag = 1;
constexpr int kDataTag = 2;
// MPI counts in int.
constexpr size_t kMaxMessageBytes = size_t{1} << 30;
// Of one rank's part in one round of a reduce_scatter.
constexpr size_t kRoundBytes = kMiB;

}  // namespace

void check_mpi(int result, const char* call) {
  if (result == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(result, text, &length);
  fail(ErrorCode::kCommunicator, "{}: {}", call, text);
}

MpiExchange::MpiExchange(MPI_Comm parent) {
  check_mpi(MPI_Comm_dup(parent, &comm_), "MPI_Comm_dup");
  check_mpi(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  MPI_Comm_rank(comm_, &rank_);
  MPI_Comm_size(comm_, &world_size_);
  ids_.resize(static_cast<size_t>(world_size_));
  staging_.resize(static_cast<size_t>(world_size_) * kRoundBytes);
}

void MpiExchange::start(const CollectiveCall& call) {
  call_ = call;
  ++number_;
  started_ = MpiClock::now();
  phase_ = Phase::kAgree;
  ids_[static_cast<size_t>(rank_)] = call.id;
  for (int r = 0; r < world_size_; ++r) {
    if (r == rank_) continue;
    receive(r, &ids_[static_cast<size_t>(r)], sizeof(CollectiveId), kIdTag);
    send(r, &ids_[static_cast<size_t>(rank_)], sizeof(CollectiveId), kIdTag);
  }
}

bool MpiExchange::progress() {
  while (phase_ != Phase::kIdle && transfers_done()) {
    if (phase_ == Phase::kAgree) {
      const std::string difference = disagreement(ids_);
      check(difference.empty(), ErrorCode::kCommunicator, "{}", difference);
      phase_ = Phase::kData;
      start_data();
    } else if (call_.id.kind == CollectiveKind::kReduceScatter) {
      finish_round();
    } else {
      phase_ = Phase::kIdle;
    }
  }
  return phase_ == Phase::kIdle;
}

void MpiExchange::abandon() noexcept {
  for (Transfer& transfer : transfers_) {
    if (transfer.request == MPI_REQUEST_NULL || transfer.source < 0) continue;
    int done = 0;
    MPI_Cancel(&transfer.request);
    MPI_Test(&transfer.request, &done, MPI_STATUS_IGNORE);
  }
}

std::vector<int> MpiExchange::missing() const {
  std::vector<int> ranks;
  for (const Transfer& transfer : transfers_) {
    if (transfer.source >= 0 && transfer.request != MPI_REQUEST_NULL &&
        std::find(ranks.begin(), ranks.end(), transfer.source) == ranks.end()) {
      ranks.push_back(transfer.source);
    }
  }
  return ranks;
}

std::string MpiExchange::description() const {
  return fmt::format("{}, collective number {}", describe(call_.id), number_);
}

void MpiExchange::send(int to, const void* data, size_t bytes, int tag) {
  const std::byte* next = static_cast<const std::byte*>(data);
  for (size_t left = bytes; left > 0;) {
    const size_t piece = std::min(left, kMaxMessageBytes);
    transfers_.push_back({});
    check_mpi(MPI_Isend(next, static_cast<int>(piece), MPI_BYTE, to, tag, comm_,
                        &transfers_.back().request),
              "MPI_Isend");
    next += piece;
    left -= piece;
  }
}

void MpiExchange::receive(int from, void* data, size_t bytes, int tag) {
  std::byte* next = static_cast<std::byte*>(data);
  for (size_t left = bytes; left > 0;) {
    const size_t piece = std::min(left, kMaxMessageBytes);
    transfers_.push_back({.source = from});
    check_mpi(MPI_Irecv(next, static_cast<int>(piece), MPI_BYTE, from, tag, comm_,
                        &transfers_.back().request),
              "MPI_Irecv");
    next += piece;
    left -= piece;
  }
}

bool MpiExchange::transfers_done() {
  bool done = true;
  for (Transfer& transfer : transfers_) {
    if (transfer.request == MPI_REQUEST_NULL) continue;
    int arrived = 0;
    check_mpi(MPI_Test(&transfer.request, &arrived, MPI_STATUS_IGNORE), "MPI_Test");
    done = done && arrived != 0;
  }
  if (done) transfers_.clear();
  return done;
}

void MpiExchange::start_data() {
  const CollectiveId& id = call_.id;
  const size_t bytes = static_cast<size_t>(id.count) * dtype_bytes(id.dtype);
  switch (id.kind) {
    case CollectiveKind::kAllGather: {
      std::byte* own = row_of(call_.recv, rank_, id);
      if (own != call_.send && bytes > 0) std::memcpy(own, call_.send, bytes);
      for (int step = 1; step < world_size_; ++step) {
        const int from = (rank_ + world_size_ - step) % world_size_;
        receive(from, row_of(call_.recv, from, id), bytes, kDataTag);
        send((rank_ + step) % world_size_, own, bytes, kDataTag);
      }
      break;
    }
    case CollectiveKind::kReduceScatter:
      round_begin_ = 0;
      start_round();
      break;
    case CollectiveKind::kBroadcast:
      if (rank_ != id.root) {
        receive(id.root, call_.recv, bytes, kDataTag);
        break;
      }
      for (int r = 0; r < world_size_; ++r) {
        if (r != rank_) send(r, call_.send, bytes, kDataTag);
      }
      break;
  }
}

void MpiExchange::start_round() {
  const CollectiveId& id = call_.id;
  const size_t element = dtype_bytes(id.dtype);
  round_count_ = std::min(static_cast<int64_t>(kRoundBytes / element), id.count - round_begin_);
  const size_t offset = static_cast<size_t>(round_begin_) * element;
  const size_t bytes = static_cast<size_t>(round_count_) * element;
  for (int step = 1; step < world_size_; ++step) {
    const int from = (rank_ + world_size_ - step) % world_size_;
    const int to = (rank_ + step) % world_size_;
    receive(from, staging_.data() + static_cast<size_t>(from) * kRoundBytes, bytes, kDataTag);
    send(to, row_of(call_.send, to, id) + offset, bytes, kDataTag);
  }
}

void MpiExchange::finish_round() {
  const CollectiveId& id = call_.id;
  const size_t offset = static_cast<size_t>(round_begin_) * dtype_bytes(id.dtype);
  std::vector<const void*> rows;
  for (int r = 0; r < world_size_; ++r) {
    rows.push_back(r == rank_ ? row_of(call_.send, rank_, id) + offset
                              : staging_.data() + static_cast<size_t>(r) * kRoundBytes);
  }
  sum_in_order(rows, static_cast<std::byte*>(call_.recv) + offset, round_count_, id.dtype);
  round_begin_ += round_count_;
  if (round_begin_ == id.count) {
    phase_ = Phase::kIdle;
  } else {
    start_round();
  }
}

}  // namespace orlop
