#include "gpu_environment.h"

#include <cstdlib>

#include "base/bytes.h"
#include "base/check.h"
#include "gpu/cuda_devices.h"

namespace orlop::test {
namespace {

class SharedBackend final : public Backend {
 public:
  explicit SharedBackend(GpuEnvironment& gpu) : gpu_(gpu) {}

  DeviceInfo info() const override { return gpu_.backend()->info(); }
  Queue& queue(QueueKind kind) override { return gpu_.backend()->queue(kind); }
  std::unique_ptr<Event> make_event() override { return gpu_.backend()->make_event(); }
  Ops& ops() override { return gpu_.backend()->ops(); }
  void* allocate_arena(size_t bytes) override {
    check(bytes <= gpu_.arena_bytes(), ErrorCode::kDoesNotFit, "the shared arena has {}",
          format_bytes(gpu_.arena_bytes()));
    return gpu_.arena();
  }
  void register_host_memory(void* address, size_t bytes) override {
    gpu_.backend()->register_host_memory(address, bytes);
  }
  void synchronize() override { gpu_.backend()->synchronize(); }

 private:
  GpuEnvironment& gpu_;
};

// Under a checker of kernels: it cannot follow the libraries', and keeps notes of its own in the
// device's memory.
bool checked() { return std::getenv("ORLOP_TEST_CHECKED_KERNELS") != nullptr; }

}  // namespace

void GpuEnvironment::SetUp() {
  if (cuda_device_count() == 0) {
    missing_ = "no GPU";
    return;
  }
  auto backend = std::make_unique<CudaBackend>(CudaBackendOptions{.own_kernels_only = checked()});
  const DeviceInfo info = backend->info();
  const size_t room = info.free_bytes - info.overhead_bytes - info.workspace_bytes;
  if (room < arena_bytes_) {
    missing_ = "the GPU has " + format_bytes(room) + " free, these tests need " +
               format_bytes(arena_bytes_);
    return;
  }
  arena_ = static_cast<std::byte*>(backend->allocate_arena(arena_bytes_));
  backend_ = std::move(backend);
  std::printf("%s, overhead %s, workspace %s, arena %s, attention: %s\n", info.name.c_str(),
              format_bytes(info.overhead_bytes).c_str(), format_bytes(info.workspace_bytes).c_str(),
              format_bytes(arena_bytes_).c_str(),
              backend_->cuda_ops().attention_description().c_str());
}

void GpuEnvironment::TearDown() {
  if (backend_ == nullptr) return;
  backend_->synchronize();
  const DeviceInfo info = backend_->info();
  const size_t promised = info.overhead_bytes + info.workspace_bytes + arena_bytes_;
  const size_t free_now = backend_->free_bytes_now();
  const size_t used = info.free_bytes > free_now ? info.free_bytes - free_now : 0;
  std::printf("device memory in use %s, promised %s\n", format_bytes(used).c_str(),
              format_bytes(promised).c_str());
  if (!checked()) {
    EXPECT_LE(used, promised) << "more device memory in use than overhead + workspace + arena";
  }
  backend_.reset();
}

std::unique_ptr<Backend> make_shared_backend() {
  return gpu().backend() != nullptr ? std::make_unique<SharedBackend>(gpu()) : nullptr;
}

}  // namespace orlop::test
