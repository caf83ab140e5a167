#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/completion.h"
#include "memory/slot_pool.h"
#include "nvme/chunk_checksum.h"
#include "nvme/extent_table.h"
#include "nvme/io_backend.h"
#include "nvme/io_queue.h"

namespace orlop::nvme {

struct SwapperOptions {
  std::vector<std::string> directories;  // one per drive
  std::vector<double>
      bandwidths;  // of the directories, any unit; empty: measured if they lie on several drives
  // What will be swapped, until add_chunks() brings more; neighbours go to different drives.
  std::vector<ChunkSpec> chunks;
  int rank = 0;
  std::string run_id;  // the same on all ranks of a run; empty: this process is the run
  bool direct = true;
  bool keep = false;  // leave the files at exit, until the next run in the same directories
  Verify verify = Verify::kSample;
  IoEngine engine = IoEngine::kAuto;
  IoQueueOptions queue;
  // The count of the day is kept in "orlop-r<rank>.writes" in the first directory, which stays
  // there, so that it holds over several runs.
  bool keep_count_of_day = false;
  int world_size = 1;  // counts that ranks beyond it have left there are taken over
  // What errors call the owner of a chunk, beside its key; may be empty. From any thread.
  std::function<std::string(const ChunkKey& key)> name_of;
};

struct SwapRequest {
  ChunkKey key;
  int64_t version = 0;   // step that writes the chunk, or that must have written it
  int64_t next_use = 0;  // smaller goes first
};

struct SwapStats {
  uint64_t bytes_read = 0;  // of this run, as moved to and from the drives
  uint64_t bytes_written = 0;
  uint64_t step_bytes_read = 0;  // since begin_step()
  uint64_t step_bytes_written = 0;
  uint64_t day_bytes_written = 0;  // since midnight UTC
  uint64_t swap_ins = 0;
  uint64_t swap_outs = 0;
  uint64_t failures = 0;
  uint64_t retries = 0;
};

struct DriveInfo {
  std::string path;
  std::string file_system;
  bool direct = false;
  std::string why_not_direct;
  double bandwidth = 0;  // as given or measured (GiB/s); 0 when there was nothing to choose
  uint64_t bytes = 0;    // of extents
};

// Moves chunks between slots and swap files, one read or one write per chunk. Operations on one
// chunk run in the order of the calls; others in the order of next_use. All calls from any thread;
// nothing waits but flush(), the destructor and the Completions' own wait().
class Swapper {
 public:
  // Creates and reserves the files. Throws as ShardFile does, and Error(kUsage) for options that
  // cannot work.
  explicit Swapper(const SwapperOptions& options);
  // The same over a given backend.
  Swapper(const SwapperOptions& options, std::unique_ptr<IoBackend> backend);
  // Fails what has not started, waits for what has within the queue's drain_limit, never throws.
  ~Swapper();
  Swapper(const Swapper&) = delete;
  Swapper& operator=(const Swapper&) = delete;

  // Reserves space for more chunks. Waits until all operations so far have ended; nobody else may
  // start one meanwhile. After an error, those of the constructor or of flush(), nothing has
  // changed.
  void add_chunks(std::span<const ChunkSpec> chunks);

  // Tells the kernel about the memory of a slot pool, which makes requests cheaper.
  void register_memory(std::span<std::byte> memory, size_t slot_bytes);

  // Reads the chunk into `slot` and gives the slot back with the outcome. After an error the slot
  // has returned to its pool. Errors: Error(kIo), or Error(kInternal) when the chunk holds another
  // version.
  Completion<SlotLease> swap_in(const SwapRequest& request, SlotLease slot);

  // Writes the chunk from `slot`, which returns to its pool before the outcome is there. After an
  // error the chunk's contents are lost and reading it is an error.
  Completion<> swap_out(const SwapRequest& request, SlotLease slot);

  // The same with memory of the caller's, in which the chunk starts; its length, rounded up to
  // alignment(), is read or written. It belongs to the operation until `done` is called, once, with
  // null or the error: on the thread `io`, or on the caller's when nothing had to be moved. `done`
  // must not throw and must not wait.
  using Done = std::function<void(const std::exception_ptr& error)>;
  void swap_in(const SwapRequest& request, std::span<std::byte> memory, Done done);
  void swap_out(const SwapRequest& request, std::span<std::byte> memory, Done done);

  // Waits until all operations so far have ended, and throws the first error since the last
  // flush().
  void flush();

  // Starts the step's counters and saves the count of the day.
  void begin_step();
  SwapStats stats() const;

  size_t alignment() const;   // of slots, in memory and in length, bytes
  size_t slot_bytes() const;  // that the largest chunk needs
  std::string_view backend_name() const;
  const std::string& backend_reason()
      const;  // why it is not io_uring; empty when it is or was given
  std::span<const DriveInfo> drives() const;

 private:
  struct Chunk;
  struct Operation;
  struct State;

  void start_up(const SwapperOptions& options);
  void enqueue(IoOp op, const SwapRequest& request, std::span<std::byte> memory, Done done);

  std::shared_ptr<State> state_;  // shared with requests that outlive a bounded destructor
  std::unique_ptr<IoQueue> queue_;
  std::string backend_reason_;
  bool keep_ = false;
};

}  // namespace orlop::nvme
