#include "engine/state_store.h"

namespace orlop {

StateStore::StateStore(Backend& backend, const PlanInput& input, const StepPlan& plan,
                       std::byte* device_arena, std::byte* host_arena)
    : backend_(backend), homes_(input.layout.flat_params.size()) {
  for (const PlanBuffer& buffer : plan.buffers) {
    if (buffer.kind != BufferKind::kState) continue;
    Home& home = homes_[static_cast<size_t>(buffer.param)];
    home.planes = state_planes(input.layout.flat_params[static_cast<size_t>(buffer.param)].numel,
                               input.compute_dtype, input.moment_dtype);
    home.tier = buffer.tier;
    home.address = (buffer.tier == Tier::kDevice ? device_arena : host_arena) + buffer.offset;
  }
}

std::byte* StateStore::host_states(int param) const {
  const Home& home = homes_[static_cast<size_t>(param)];
  return home.tier == Tier::kHost ? home.address : nullptr;
}

void StateStore::with_states(int param, bool write, const std::function<void(std::byte*)>& use) {
  const Home& home = homes_[static_cast<size_t>(param)];
  if (home.tier == Tier::kHost) {
    use(home.address);
    return;
  }
  staging_.resize(home.planes.bytes);
  Queue& offload = backend_.queue(QueueKind::kOffload);
  offload.offload(staging_.data(), home.address, home.planes.bytes);
  offload.synchronize();
  use(staging_.data());
  if (!write) return;
  Queue& upload = backend_.queue(QueueKind::kUpload);
  upload.upload(home.address, staging_.data(), home.planes.bytes);
  upload.synchronize();
}

}  // namespace orlop
