#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <thread>
#include <vector>

#include "backend/backend.h"
#include "base/trace.h"
#include "engine/checkpoint.h"
#include "engine/state_store.h"

namespace orlop {

// What saves work on.
struct BackgroundSaveParts {
  const ModelLayout& layout;
  Communicator& ranks;                 // for the saving thread alone
  StateStore states;                   // for the saving thread alone
  std::vector<int> update_order = {};  // FlatParams as steps update them
  size_t copied = 0;                   // so many of the first of them fit into the snapshot
  std::byte* snapshot = nullptr;
  std::vector<Gate> updated = {};  // per FlatParam, opened by its host update; empty on the device
  std::vector<Gate> saved = {};    // likewise, opened by the save that does not read it any more
  Tracer* tracer = nullptr;
};

// What one save writes, and where.
struct SaveRequest {
  CheckpointPlace place;
  TrainingState training;
  uint32_t version = 0;  // of the states: host updates that still run are waited for
};

// Writes checkpoints on a thread of its own ("save"), beside the steps that follow. It goes through
// FlatParams in the order in which the next step updates them; that update waits until the
// FlatParam is written, or copied to the snapshot. Used by one thread.
class BackgroundSave {
 public:
  explicit BackgroundSave(BackgroundSaveParts parts);
  // Waits for the save that runs; logs its error, which nobody asked for.
  ~BackgroundSave();
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;

  // Returns at once, or, while a save runs, when that one is over; throws its error and starts
  // nothing then. Returns the folder that will be there.
  std::filesystem::path start(SaveRequest request);

  // Waits for the save that runs. Throws its error, once.
  void wait();

  // Throws the error of a save that is over, once; does not wait.
  void check_finished();

  // The save that updates must wait for, or 0.
  uint32_t running() const { return over_.load(std::memory_order_acquire) ? 0 : number_; }

 private:
  void run(const SaveRequest& request);
  void release(int param) const { open_gate(parts_.saved[static_cast<size_t>(param)], number_); }
  void await_update(int param, uint32_t version) const;

  BackgroundSaveParts parts_;
  uint32_t number_ = 0;  // of the save that runs or was the last
  std::atomic<bool> over_{true};
  std::exception_ptr error_;  // of the thread, read when it is over
  std::thread thread_;
};

}  // namespace orlop
