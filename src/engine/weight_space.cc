#include "engine/weight_space.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <new>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "base/log.h"
#include "engine/swap_space.h"
#include "zero/step_plan.h"

namespace orlop {
namespace {

// Chunks of reads and writes of whole weights that are under way at once.
constexpr size_t kStaged = 4;
// A slot of the optimizer holds a chunk of weights with at most six times its bytes of states
// (fp16: 2 bytes beside 12).
constexpr size_t kSlotPerChunk = 7;
// The kernel registers memory in pieces of at most so many bytes, which no slot may straddle.
constexpr size_t kMostRegistered = size_t{1} << 30;

size_t chunk_of(const StateDrives& drives) {
  const size_t bytes = drives.slot_bytes / kSlotPerChunk / kDriveAlignment * kDriveAlignment;
  check(bytes > 0, ErrorCode::kUsage,
        "a slot of {} bytes is too small for weights on drives; give at least {}",
        drives.slot_bytes, kSlotPerChunk * kDriveAlignment);
  return bytes;
}

constexpr size_t count_of(size_t bytes, size_t chunk_bytes) {
  return (bytes + chunk_bytes - 1) / chunk_bytes;
}

}  // namespace

class WeightSpace::Turn : public Event {
 public:
  // `earlier`: the fetch into the same slot before, which ends on another thread than this waits
  // on.
  Turn(Fence free, Updated earlier, const Weight& weight)
      : free_(free), earlier_(std::move(earlier)), updated_(weight.updated), name_(weight.name) {}

  void synchronize() override {
    if (earlier_.version != 0) await_gate(earlier_.gate, earlier_.version);
    const int status = free_.wait == nullptr ? 0 : free_.wait(free_.handle);
    check(status == 0, ErrorCode::kDevice,
          "the slot for '{}' did not become free: the device reports status {}", name_, status);
    updated_.wait(name_);
  }
  bool query() const override { return false; }

 private:
  Fence free_;
  Updated earlier_;
  Updated updated_;
  std::string name_;
};

WeightSpace::WeightSpace(const StateDrives& drives)
    : chunk_bytes_(chunk_of(drives)), staging_(kStaged * chunk_bytes_, kDriveAlignment) {
  nvme::SwapperOptions options = swapper_options(drives.nvme);
  options.rank = next_swap_owner();
  options.name_of = [this](const nvme::ChunkKey& key) {
    return fmt::format("'{}'", at(key.shard).name);
  };
  swapper_ = std::make_unique<nvme::Swapper>(options);
  check_alignment(*swapper_);
}

WeightSpace::~WeightSpace() {
  lane_.reset();  // and with it whatever waits for a gate
}

int64_t WeightSpace::add(std::span<const DriveWeight> weights) {
  wait_fetches();
  const auto first = static_cast<int64_t>(weights_.size());
  for (const DriveWeight& weight : weights) {
    check(weight.bytes > 0, ErrorCode::kUsage, "'{}' has no bytes to be on drives", weight.name);
  }
  for (const DriveWeight& weight : weights) weights_.push_back({weight.name, weight.bytes, {}});
  try {
    std::vector<nvme::ChunkSpec> places;
    for (auto index = first; index < static_cast<int64_t>(weights_.size()); ++index) {
      for (size_t chunk = 0; chunk < count_chunks(index); ++chunk) {
        const SwapPiece placed = piece(index, chunk, nullptr);
        const size_t left = bytes(index) - chunk * chunk_bytes_;
        places.push_back({placed.key, std::min(left, chunk_bytes_)});
      }
    }
    swapper_->add_chunks(places);
  } catch (...) {
    weights_.resize(static_cast<size_t>(first));
    throw;
  }
  versions_.resize(weights_.size(), 0);
  return first;
}

const WeightSpace::Weight& WeightSpace::at(int64_t index) const {
  check(index >= 0 && static_cast<size_t>(index) < weights_.size(), ErrorCode::kUsage,
        "weight {} of {} on drives does not exist", index, weights_.size());
  return weights_[static_cast<size_t>(index)];
}

size_t WeightSpace::count_chunks(int64_t index) const {
  return count_of(bytes(index), chunk_bytes_);
}

SwapPiece WeightSpace::piece(int64_t index, size_t chunk, std::byte* memory) {
  const size_t left = bytes(index) - chunk * chunk_bytes_;
  const size_t taken = align_up(std::min(left, chunk_bytes_), kDriveAlignment);
  return {
      {static_cast<int32_t>(index), static_cast<int32_t>(chunk)}, {memory, taken}, swapper_.get()};
}

// ---------------------------------------------------------------------------------------------------
// Whole weights

void WeightSpace::write(int64_t index, std::span<const std::byte> values) {
  check(values.size() == bytes(index), ErrorCode::kUsage, "'{}' has {} bytes, {} given",
        at(index).name, bytes(index), values.size());
  move(index, nvme::IoOp::kWrite, nullptr, values.data());
}

void WeightSpace::read(int64_t index, std::span<std::byte> values) {
  check(values.size() == bytes(index), ErrorCode::kUsage, "'{}' has {} bytes, room for {} given",
        at(index).name, bytes(index), values.size());
  move(index, nvme::IoOp::kRead, values.data(), nullptr);
}

void WeightSpace::Updated::wait(const std::string& name) const {
  if (version == 0) return;
  await_gate(gate, version);
  check(gate.value->load() != Gate::kFailed, ErrorCode::kIo, "the last update of '{}' failed",
        name);
}

// Every transfer has ended when this returns or throws.
void WeightSpace::move(int64_t index, nvme::IoOp op, std::byte* into, const std::byte* from) {
  at(index).updated.wait(at(index).name);
  const size_t total = bytes(index);
  std::deque<std::pair<size_t, Completion<>>> under_way;
  std::exception_ptr error;
  const auto memory_of = [&](size_t chunk) {
    return staging_.data() + chunk % kStaged * chunk_bytes_;
  };
  const auto bytes_of = [&](size_t chunk) {
    return std::min(chunk_bytes_, total - chunk * chunk_bytes_);
  };
  const auto end_first = [&] {
    const auto [chunk, moved] = under_way.front();
    under_way.pop_front();
    const std::exception_ptr failure = moved.wait_error();
    if (!error) error = failure;
    if (into != nullptr && !failure)
      std::memcpy(into + chunk * chunk_bytes_, memory_of(chunk), bytes_of(chunk));
  };
  for (size_t chunk = 0; chunk < count_chunks(index) && !error; ++chunk) {
    if (under_way.size() == kStaged) end_first();
    if (from != nullptr)
      std::memcpy(memory_of(chunk), from + chunk * chunk_bytes_, bytes_of(chunk));
    under_way.emplace_back(chunk, start(index, chunk, op, memory_of(chunk)));
  }
  while (!under_way.empty()) end_first();
  if (error) std::rethrow_exception(error);
}

Completion<> WeightSpace::start(int64_t index, size_t chunk, nvme::IoOp op, std::byte* memory) {
  const SwapPiece moved = piece(index, chunk, memory);
  const nvme::SwapRequest request{moved.key, version(index), 0};
  Completion<> ended;
  const auto done = [ended](const std::exception_ptr& error) mutable {
    error ? ended.set_error(error) : ended.set_value();
  };
  if (op == nvme::IoOp::kRead) {
    swapper_->swap_in(request, moved.memory, done);
  } else {
    swapper_->swap_out(request, moved.memory, done);
  }
  return ended;
}

// ---------------------------------------------------------------------------------------------------
// Blocks

void WeightSpace::take_slots(size_t count, size_t bytes) {
  check(!arena_, ErrorCode::kUsage, "slots for weights of drives are taken once");
  slot_bytes_ = align_up(bytes, kDriveAlignment);
  slot_tickets_.assign(count, 0);
  arena_.emplace(kPageBytes + count * slot_bytes_);
  const std::span<std::byte> page = arena_->carve(kPageBytes, "gate of fetches", kPageBytes);
  const std::span<std::byte> slots =
      arena_->carve(count * slot_bytes_, "slots of weights", kPageBytes);
  if (slot_bytes_ > 0 && slot_bytes_ <= kMostRegistered)
    swapper_->register_memory(slots, slot_bytes_);
  const Gate gate{new (page.data()) std::atomic<uint32_t>(0)};
  lane_ = std::make_unique<SwapLane>("weights", *swapper_, std::vector<Gate>{}, versions_, gate);
}

std::byte* WeightSpace::slot(size_t index) const {
  const size_t begin = kPageBytes + index * slot_bytes_;
  check(arena_ && begin + slot_bytes_ <= arena_->capacity_bytes(), ErrorCode::kUsage,
        "slot {} for weights of drives does not exist", index);
  return arena_->data() + begin;
}

Gate WeightSpace::fetched() const {
  check(lane_ != nullptr, ErrorCode::kUsage,
        "weights come from drives into slots: take_slots() first");
  return lane_->ended();
}

uint32_t WeightSpace::fetch(std::span<const int64_t> weights, size_t slot, Fence free) {
  std::byte* const begin = this->slot(slot);
  std::byte* memory = begin;
  Fetch made;
  Updated earlier{fetched(), slot_tickets_[slot], nullptr};
  for (const int64_t index : weights) {
    const Weight& weight = at(index);
    made.turns.push_back(
        std::make_unique<Turn>(std::exchange(free, {}), std::exchange(earlier, {}), weight));
    SwapLane::Swap swap;
    swap.what = "weights for their block";
    swap.param = static_cast<int>(index);
    swap.after = {made.turns.back().get()};
    for (size_t chunk = 0; chunk < count_chunks(index); ++chunk) {
      swap.pieces.push_back(piece(index, chunk, memory));
      memory += swap.pieces.back().memory.size();
    }
    made.swaps.push_back(std::move(swap));
  }
  const auto taken = static_cast<size_t>(memory - begin);
  check(taken > 0 && taken <= slot_bytes_, ErrorCode::kUsage,
        "weights of {} bytes are to come from drives into a slot of {}", taken, slot_bytes_);
  lane_->rethrow();
  forget_ended();
  fetches_.push_back(std::move(made));  // the lane keeps the address of every swap
  Fetch& kept = fetches_.back();
  SwapLane::Turn turn;
  turn.updates = false;  // its own turns wait for them
  for (const SwapLane::Swap& swap : kept.swaps) kept.ticket = lane_->issue(swap, turn);
  slot_tickets_[slot] = kept.ticket;
  return kept.ticket;
}

void WeightSpace::forget_ended() {
  const uint32_t ended = lane_->ended().value->load(std::memory_order_acquire);
  while (!fetches_.empty() && ended != Gate::kFailed && fetches_.front().ticket <= ended)
    fetches_.pop_front();
}

void WeightSpace::wait(uint32_t ticket) {
  await_gate(fetched(), ticket);
  lane_->rethrow();
}

void WeightSpace::synchronize() {
  wait_fetches();
  if (lane_ != nullptr) lane_->rethrow();
}

void WeightSpace::wait_fetches() {
  if (lane_ != nullptr) lane_->wait_ended();
}

std::vector<std::span<std::byte>> WeightSpace::ranges() const {
  if (!arena_) return {};
  return {{arena_->data(), arena_->capacity_bytes()}};
}

// ---------------------------------------------------------------------------------------------------
// Updates

void WeightSpace::expect(int64_t index, Gate gate, uint32_t version,
                         std::shared_ptr<const void> keeps) {
  at(index);
  const auto position = static_cast<size_t>(index);
  weights_[position].updated = {gate, version, std::move(keeps)};
  versions_[position] = version;
}

void WeightSpace::end_updates() {
  wait_fetches();
  try {
    swapper_->flush();
  } catch (const std::exception& error) {
    log_warning("weights on drives: {}", error.what());
  }
  for (Weight& weight : weights_) weight.updated = {};
}

}  // namespace orlop
