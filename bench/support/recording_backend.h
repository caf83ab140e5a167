#pragma once

#include <memory>
#include <vector>

#include "backend/backend.h"
#include "backend/ops.h"

namespace orlop::bench {

// A backend whose operations note the matmuls that are asked for and do nothing: a walk over a plan
// tells the shapes of a step. Queues, copies and memory are those of `backend`, which stays.
class RecordingBackend final : public Backend {
 public:
  RecordingBackend(std::unique_ptr<Backend> backend, std::vector<MatmulArgs>& matmuls);
  ~RecordingBackend() override;

  DeviceInfo info() const override { return backend_->info(); }
  Queue& queue(QueueKind kind) override { return backend_->queue(kind); }
  std::unique_ptr<Event> make_event() override { return backend_->make_event(); }
  Ops& ops() override { return *ops_; }
  void* allocate_arena(size_t bytes) override { return backend_->allocate_arena(bytes); }
  void register_host_memory(void* address, size_t bytes) override {
    backend_->register_host_memory(address, bytes);
  }
  void synchronize() override { backend_->synchronize(); }

 private:
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Ops> ops_;
};

}  // namespace orlop::bench
