#include "nvme/swapper.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>
#include <vector>

#include "base/bytes.h"
#include "base/check.h"
#include "base/log.h"
#include "nvme/direct_io.h"
#include "nvme/drive_weights.h"
#include "nvme/shard_file.h"
#include "nvme/write_ledger.h"

namespace orlop::nvme {
namespace {

constexpr int64_t kNoVersion = -1;

uint64_t checksum_seed(const SwapRequest& request) {
  return (static_cast<uint64_t>(request.key.shard) << 40) ^
         (static_cast<uint64_t>(request.key.chunk) << 20) ^ static_cast<uint64_t>(request.version);
}

}  // namespace

struct Swapper::Operation {
  IoOp op = IoOp::kRead;
  size_t chunk = 0;
  SwapRequest request;
  std::span<std::byte> memory;
  uint64_t checksum = 0;  // of a write
  std::string owner;      // of the chunk, for messages
  Done done;

  std::string describe() const {
    return fmt::format("{} of shard {} chunk {}{} (version {})",
                       op == IoOp::kRead ? "swap_in" : "swap_out", request.key.shard,
                       request.key.chunk, owner, request.version);
  }
};

struct Swapper::Chunk {
  int64_t version = kNoVersion;
  uint64_t checksum = 0;
  std::string lost;  // the failed swap_out after which the contents are undefined
  std::vector<std::shared_ptr<Operation>> queue;  // the front one runs, and few wait
};

// All but the queue: what requests need until they end.
struct Swapper::State : std::enable_shared_from_this<Swapper::State> {
  std::vector<std::unique_ptr<ShardFile>> files;
  std::vector<DriveInfo> drives;
  std::optional<ExtentTable> table;
  std::function<std::string(const ChunkKey&)> name_of;
  Verify verify = Verify::kOff;
  size_t alignment = 1;
  size_t slot_bytes = 0;

  mutable std::mutex mutex;  // guards the rest
  std::condition_variable idle;
  IoQueue* queue = nullptr;  // null once the swapper shuts down
  std::vector<Chunk> chunks;
  size_t running = 0;              // operations that have not ended
  std::exception_ptr first_error;  // of a swap_out, since the last flush()
  SwapStats stats;
  WriteLedger ledger;

  void reserve(const ExtentTable& extents);
  void start(const std::shared_ptr<Operation>& operation);
  void check_start(const Operation& operation) const;
  void finish(const std::shared_ptr<Operation>& operation, std::exception_ptr error);
  void check_read(const Operation& operation) const;
  void count(const Operation& operation, const Extent& extent, bool failed);
};

// ---------------------------------------------------------------------------------------------------
// Start and end

Swapper::Swapper(const SwapperOptions& options) {
  BackendChoice choice = make_io_backend(options.engine, options.queue.depth);
  backend_reason_ = std::move(choice.reason);
  queue_ = std::make_unique<IoQueue>(std::move(choice.backend), options.queue);
  start_up(options);
}

Swapper::Swapper(const SwapperOptions& options, std::unique_ptr<IoBackend> backend)
    : queue_(std::make_unique<IoQueue>(std::move(backend), options.queue)) {
  start_up(options);
}

void Swapper::start_up(const SwapperOptions& options) {
  const size_t count = options.directories.size();
  check(count > 0, ErrorCode::kUsage, "no swap directory was given; name one with --nvme");
  check(options.bandwidths.empty() || options.bandwidths.size() == count, ErrorCode::kUsage,
        "{} bandwidths for {} swap directories", options.bandwidths.size(), count);
  state_ = std::make_shared<State>();
  State& state = *state_;
  state.verify = options.verify;
  state.name_of = options.name_of;
  const std::string run_id = options.run_id.empty() ? default_run_id() : options.run_id;
  for (const std::string& directory : options.directories) {
    state.files.push_back(std::make_unique<ShardFile>(
        ShardFileOptions{directory, options.rank, run_id, options.direct}));
    state.alignment = std::max(state.alignment, state.files.back()->alignment());
  }
  const DriveWeights drives = drive_weights(*queue_, state.files, options.bandwidths);
  for (size_t i = 0; i < count; ++i) {
    const ShardFile& file = *state.files[i];
    state.drives.push_back({file.path(), file_system_name(file.fd()), file.direct(),
                            file.direct_io().why_not, drives.are_known ? drives.weights[i] : 0, 0});
  }
  state.table.emplace(options.chunks, drives.weights, state.alignment, state.alignment);
  state.reserve(*state.table);
  for (const auto& file : state.files) {
    queue_->with_backend([&](IoBackend& backend) { backend.register_file(file->fd()); });
  }
  if (options.keep_count_of_day) {
    state.ledger =
        WriteLedger(absolute_path(options.directories[0]), options.rank, options.world_size);
  }
  state.queue = queue_.get();
  keep_ = options.keep;
}

// Gives every file the length that `extents` need, and every chunk of theirs its entry.
void Swapper::State::reserve(const ExtentTable& extents) {
  for (size_t i = 0; i < files.size(); ++i) {
    const auto records = std::ranges::count_if(
        extents.extents(), [i](const Extent& extent) { return extent.file == i; });
    files[i]->reserve(alignment, extents.bytes_per_file()[i], static_cast<uint64_t>(records));
    drives[i].bytes = extents.bytes_per_file()[i];
  }
  for (const Extent& extent : extents.extents()) {
    slot_bytes = std::max<size_t>(slot_bytes, extent.capacity);
  }
  chunks.resize(extents.extents().size());
}

void Swapper::add_chunks(std::span<const ChunkSpec> chunks) {
  flush();
  State& state = *state_;
  ExtentTable grown = *state.table;
  grown.add(chunks);
  std::lock_guard lock(state.mutex);
  try {
    state.reserve(grown);
  } catch (...) {
    state.reserve(*state.table);  // the files are as long as they were
    throw;
  }
  state.table = std::move(grown);
}

Swapper::~Swapper() {
  {
    std::lock_guard lock(state_->mutex);
    state_->queue = nullptr;
  }
  queue_.reset();
  std::lock_guard lock(state_->mutex);
  state_->ledger.save();
  if (!keep_) return;
  try {
    check(state_->running == 0, ErrorCode::kIo, "{} operations have not ended", state_->running);
    for (uint32_t i = 0; i < state_->files.size(); ++i) {
      std::vector<ChunkRecord> records;
      for (size_t c = 0; c < state_->chunks.size(); ++c) {
        const Extent& extent = state_->table->extents()[c];
        if (extent.file != i) continue;
        const Chunk& chunk = state_->chunks[c];
        records.push_back({extent.key, extent.offset, extent.bytes, chunk.version, chunk.checksum});
      }
      state_->files[i]->keep(records, static_cast<uint32_t>(state_->verify));
    }
  } catch (const std::exception& error) {
    log_warning("the swap files are not kept: {}", error.what());
  }
}

void Swapper::register_memory(std::span<std::byte> memory, size_t slot_bytes) {
  queue_->with_backend([&](IoBackend& backend) { backend.register_buffer(memory, slot_bytes); });
}

// ---------------------------------------------------------------------------------------------------
// Operations

void Swapper::swap_in(const SwapRequest& request, std::span<std::byte> memory, Done done) {
  enqueue(IoOp::kRead, request, memory, std::move(done));
}

void Swapper::swap_out(const SwapRequest& request, std::span<std::byte> memory, Done done) {
  enqueue(IoOp::kWrite, request, memory, std::move(done));
}

Completion<SlotLease> Swapper::swap_in(const SwapRequest& request, SlotLease slot) {
  Completion<SlotLease> outcome;
  const auto lease = std::make_shared<SlotLease>(std::move(slot));
  swap_in(request, lease->span(), [outcome, lease](const std::exception_ptr& error) mutable {
    if (error) {
      lease->release();
      outcome.set_error(error);
    } else {
      outcome.set_value(std::move(*lease));
    }
  });
  return outcome;
}

Completion<> Swapper::swap_out(const SwapRequest& request, SlotLease slot) {
  Completion<> outcome;
  const auto lease = std::make_shared<SlotLease>(std::move(slot));
  swap_out(request, lease->span(), [outcome, lease](const std::exception_ptr& error) mutable {
    lease->release();
    error ? outcome.set_error(error) : outcome.set_value();
  });
  return outcome;
}

// Checks what the caller got wrong and throws at once; everything later goes to `done`.
void Swapper::enqueue(IoOp op, const SwapRequest& request, std::span<std::byte> memory, Done done) {
  State& state = *state_;
  auto operation = std::make_shared<Operation>();
  operation->op = op;
  operation->request = request;
  operation->memory = memory;
  operation->done = std::move(done);
  if (state.name_of) operation->owner = fmt::format(" of {}", state.name_of(request.key));
  operation->chunk = state.table->find(request.key);
  const Extent& extent = state.table->extents()[operation->chunk];
  const size_t memory_alignment = state.files[extent.file]->direct_io().memory_alignment;
  check(memory.data() != nullptr && memory.size() >= extent.capacity, ErrorCode::kUsage,
        "{}: the slot has {} bytes, {} are needed", operation->describe(), memory.size(),
        extent.capacity);
  check(reinterpret_cast<uintptr_t>(memory.data()) % memory_alignment == 0, ErrorCode::kUsage,
        "{}: the slot at {} is not aligned to the {} bytes that direct I/O on {} needs",
        operation->describe(), fmt::ptr(memory.data()), memory_alignment,
        state.files[extent.file]->path());
  check(request.version >= 0, ErrorCode::kUsage, "{}: versions count from 0",
        operation->describe());
  if (op == IoOp::kWrite) {
    std::memset(memory.data() + extent.bytes, 0, extent.capacity - extent.bytes);
    operation->checksum =
        chunk_checksum(memory.first(extent.bytes), state.verify, checksum_seed(request));
  }
  bool first = false;
  {
    std::lock_guard lock(state.mutex);
    Chunk& chunk = state.chunks[operation->chunk];
    chunk.queue.push_back(operation);
    ++state.running;
    first = chunk.queue.size() == 1;
  }
  if (first) state.start(operation);
}

// The operation is the front one of its chunk, so the chunk's version is settled.
void Swapper::State::start(const std::shared_ptr<Operation>& operation) {
  const Extent& extent = table->extents()[operation->chunk];
  const ShardFile& file = *files[extent.file];
  Transfer transfer;
  IoQueue* target = nullptr;
  try {
    file.check_length();
    std::lock_guard lock(mutex);
    check_start(*operation);
    Chunk& chunk = chunks[operation->chunk];
    if (operation->op == IoOp::kWrite) chunk.version = kNoVersion;  // torn until it is done
    target = queue;
  } catch (const Error& error) {
    finish(operation,
           std::make_exception_ptr(
               Error(error.code(), fmt::format("{}: {}", operation->describe(), error.what()))));
    return;
  }
  transfer.op = operation->op;
  transfer.fd = file.fd();
  transfer.offset = extent.offset;
  transfer.data = operation->memory.first(extent.capacity);
  transfer.alignment = alignment;
  transfer.priority = operation->request.next_use;
  transfer.operation = operation->describe();
  transfer.path = file.path();
  transfer.done = [self = shared_from_this(), operation](std::exception_ptr error) {
    self->finish(operation, std::move(error));
  };
  target->submit(std::move(transfer));
}

// Under the mutex.
void Swapper::State::check_start(const Operation& operation) const {
  const Chunk& chunk = chunks[operation.chunk];
  check(queue != nullptr, ErrorCode::kIo, "cancelled, because the engine is shutting down");
  if (operation.op == IoOp::kWrite) return;
  check(chunk.lost.empty(), ErrorCode::kIo, "its contents are lost: {}", chunk.lost);
  check(chunk.version != kNoVersion, ErrorCode::kInternal, "it was never written");
  check(chunk.version == operation.request.version, ErrorCode::kInternal, "it holds version {}",
        chunk.version);
}

// On the thread `io`, or on the caller's for an operation that could not start.
void Swapper::State::finish(const std::shared_ptr<Operation>& operation, std::exception_ptr error) {
  const Extent& extent = table->extents()[operation->chunk];
  if (!error && operation->op == IoOp::kRead) {
    try {
      check_read(*operation);
    } catch (const Error&) {
      error = std::current_exception();
    }
  }
  std::shared_ptr<Operation> next;
  {
    std::lock_guard lock(mutex);
    Chunk& chunk = chunks[operation->chunk];
    count(*operation, extent, error != nullptr);
    if (operation->op == IoOp::kWrite && error) {
      try {
        std::rethrow_exception(error);
      } catch (const std::exception& reason) {
        chunk.lost = reason.what();
      }
      if (!first_error) first_error = error;
    } else if (operation->op == IoOp::kWrite) {
      chunk.lost.clear();
      chunk.version = operation->request.version;
      chunk.checksum = operation->checksum;
    }
    chunk.queue.erase(chunk.queue.begin());
    if (!chunk.queue.empty()) next = chunk.queue.front();
  }
  operation->done(error);
  {
    std::lock_guard lock(mutex);
    if (--running == 0) idle.notify_all();
  }
  if (next) start(next);
}

void Swapper::State::check_read(const Operation& operation) const {
  if (verify == Verify::kOff) return;
  const Extent& extent = table->extents()[operation.chunk];
  const uint64_t found = chunk_checksum(operation.memory.first(extent.bytes), verify,
                                        checksum_seed(operation.request));
  uint64_t expected = 0;
  {
    std::lock_guard lock(mutex);
    expected = chunks[operation.chunk].checksum;
  }
  check(found == expected, ErrorCode::kIo,
        "{}: {} bytes at offset {} of {} have the checksum {:016x}, {:016x} was written: the drive "
        "or "
        "something else changed them",
        operation.describe(), extent.bytes, extent.offset, files[extent.file]->path(), found,
        expected);
}

// Under the mutex.
void Swapper::State::count(const Operation& operation, const Extent& extent, bool failed) {
  if (failed) {
    ++stats.failures;
  } else if (operation.op == IoOp::kRead) {
    ++stats.swap_ins;
    stats.bytes_read += extent.capacity;
    stats.step_bytes_read += extent.capacity;
  } else {
    ++stats.swap_outs;
    stats.bytes_written += extent.capacity;
    stats.step_bytes_written += extent.capacity;
    ledger.add(extent.capacity);
  }
}

void Swapper::flush() {
  std::unique_lock lock(state_->mutex);
  state_->idle.wait(lock, [this] { return state_->running == 0; });
  if (state_->first_error) std::rethrow_exception(std::exchange(state_->first_error, nullptr));
}

// ---------------------------------------------------------------------------------------------------
// Figures

void Swapper::begin_step() {
  std::lock_guard lock(state_->mutex);
  state_->stats.step_bytes_read = 0;
  state_->stats.step_bytes_written = 0;
  state_->ledger.save();
}

SwapStats Swapper::stats() const {
  std::lock_guard lock(state_->mutex);
  SwapStats stats = state_->stats;
  stats.day_bytes_written = state_->ledger.bytes_today();
  stats.retries = queue_->stats().retries;
  return stats;
}

size_t Swapper::alignment() const { return state_->alignment; }

size_t Swapper::slot_bytes() const { return state_->slot_bytes; }

std::string_view Swapper::backend_name() const { return queue_->backend_name(); }

const std::string& Swapper::backend_reason() const { return backend_reason_; }

std::span<const DriveInfo> Swapper::drives() const { return state_->drives; }

}  // namespace orlop::nvme
