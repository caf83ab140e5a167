#include "comm/exchange.h"

#include <algorithm>
#include <cstring>

#include "base/bytes.h"
#include "base/check.h"

namespace orlop {
namespace {

// Of one rank's part in one round of a reduce_scatter.
constexpr size_t kRoundBytes = kMiB;

}  // namespace

Exchange::Exchange(Transport& transport, int lane)
    : transport_(transport),
      lane_(lane),
      rank_(transport.rank()),
      world_size_(transport.world_size()),
      ids_(static_cast<size_t>(world_size_)) {}

void Exchange::start(const CollectiveCall& call) {
  call_ = call;
  ++number_;
  started_ = Transport::Clock::now();
  phase_ = Phase::kAgree;
  ids_[static_cast<size_t>(rank_)] = call.id;
  for (int r = 0; r < world_size_; ++r) {
    if (r == rank_) continue;
    receive(r, &ids_[static_cast<size_t>(r)], sizeof(CollectiveId));
    send(r, &ids_[static_cast<size_t>(rank_)], sizeof(CollectiveId));
  }
}

bool Exchange::progress() {
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

void Exchange::abandon() noexcept {
  for (const Transfer& transfer : transfers_) transport_.cancel(transfer.request);
  transfers_.clear();
}

std::vector<int> Exchange::missing() const {
  std::vector<int> ranks;
  for (const Transfer& transfer : transfers_) {
    if (transfer.source >= 0) ranks.push_back(transfer.source);
  }
  return ranks;
}

std::string Exchange::description() const {
  return fmt::format("{}, collective number {}", describe(call_.id), number_);
}

void Exchange::send(int to, const void* data, size_t bytes) {
  transfers_.push_back({.request = transport_.send(to, lane_, data, bytes)});
}

void Exchange::receive(int from, void* data, size_t bytes) {
  transfers_.push_back({.request = transport_.receive(from, lane_, data, bytes), .source = from});
}

bool Exchange::transfers_done() {
  std::erase_if(transfers_,
                [this](const Transfer& transfer) { return transport_.test(transfer.request); });
  return transfers_.empty();
}

void Exchange::start_data() {
  const CollectiveId& id = call_.id;
  const size_t bytes = static_cast<size_t>(id.count) * dtype_bytes(id.dtype);
  switch (id.kind) {
    case CollectiveKind::kAllGather: {
      std::byte* own = row_of(call_.recv, rank_, id);
      if (own != call_.send && bytes > 0) std::memcpy(own, call_.send, bytes);
      for (int step = 1; step < world_size_; ++step) {
        const int from = (rank_ + world_size_ - step) % world_size_;
        receive(from, row_of(call_.recv, from, id), bytes);
        send((rank_ + step) % world_size_, own, bytes);
      }
      break;
    }
    case CollectiveKind::kAllToAll:
      if (bytes > 0) {
        std::memcpy(row_of(call_.recv, rank_, id), row_of(call_.send, rank_, id), bytes);
      }
      for (int step = 1; step < world_size_; ++step) {
        const int from = (rank_ + world_size_ - step) % world_size_;
        const int to = (rank_ + step) % world_size_;
        receive(from, row_of(call_.recv, from, id), bytes);
        send(to, row_of(call_.send, to, id), bytes);
      }
      break;
    case CollectiveKind::kReduceScatter:
      round_begin_ = 0;
      start_round();
      break;
    case CollectiveKind::kBroadcast:
      if (rank_ != id.root) {
        receive(id.root, call_.recv, bytes);
        break;
      }
      for (int r = 0; r < world_size_; ++r) {
        if (r != rank_) send(r, call_.send, bytes);
      }
      break;
  }
}

std::byte* Exchange::staged(int rank) {
  return staging_.data() + static_cast<size_t>(rank) * kRoundBytes;
}

void Exchange::start_round() {
  staging_.resize(static_cast<size_t>(world_size_) * kRoundBytes);
  const CollectiveId& id = call_.id;
  const size_t element = dtype_bytes(id.dtype);
  round_count_ = std::min(static_cast<int64_t>(kRoundBytes / element), id.count - round_begin_);
  const size_t offset = static_cast<size_t>(round_begin_) * element;
  const size_t bytes = static_cast<size_t>(round_count_) * element;
  for (int step = 1; step < world_size_; ++step) {
    const int from = (rank_ + world_size_ - step) % world_size_;
    const int to = (rank_ + step) % world_size_;
    receive(from, staged(from), bytes);
    send(to, row_of(call_.send, to, id) + offset, bytes);
  }
}

void Exchange::finish_round() {
  const CollectiveId& id = call_.id;
  const size_t offset = static_cast<size_t>(round_begin_) * dtype_bytes(id.dtype);
  std::vector<const void*> rows;
  for (int r = 0; r < world_size_; ++r) {
    rows.push_back(r == rank_ ? row_of(call_.send, rank_, id) + offset : staged(r));
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
