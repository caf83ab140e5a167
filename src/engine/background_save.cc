#include "engine/background_save.h"

#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "base/thread.h"
#include "formats/manifest.h"

namespace orlop {

BackgroundSave::BackgroundSave(BackgroundSaveParts parts) : parts_(std::move(parts)) {}

BackgroundSave::~BackgroundSave() {
  try {
    wait();
  } catch (const std::exception& error) {
    log_line(LogLevel::kError, error.what());
  }
}

std::filesystem::path BackgroundSave::start(SaveRequest request) {
  wait();
  ++number_;
  over_ = false;
  const std::filesystem::path folder =
      checkpoint_folder(request.place.root, request.training.steps);
  thread_ = start_thread("save", [this, request = std::move(request)] {
    try {
      run(request);
    } catch (const Error& error) {
      error_ = std::make_exception_ptr(Error(
          error.code(), fmt::format("save of step {}: {}", request.training.steps, error.what())));
    } catch (...) {
      error_ = std::current_exception();
    }
    for (const int param : parts_.update_order) release(param);
    over_.store(true, std::memory_order_release);
  });
  return folder;
}

void BackgroundSave::wait() {
  if (thread_.joinable()) thread_.join();
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void BackgroundSave::check_finished() {
  if (over_.load(std::memory_order_acquire)) wait();
}

void BackgroundSave::await_update(int param, uint32_t version) const {
  const Gate& gate = parts_.updated[static_cast<size_t>(param)];
  if (gate.value == nullptr) return;  // its update was over when the step was
  await_gate(gate, version);
  check(gate.value->load() != Gate::kFailed, ErrorCode::kInternal,
        "the update of {} failed; the last checkpoint is as it was",
        parts_.layout.flat_params[static_cast<size_t>(param)].name);
}

// What fits into the snapshot is copied first, since updates wait for it first, and written last.
void BackgroundSave::run(const SaveRequest& request) {
  const auto begin = Tracer::Clock::now();
  const std::vector<int>& updates = parts_.update_order;
  const auto copied_end = updates.begin() + static_cast<std::ptrdiff_t>(parts_.copied);
  parts_.states.read_in_place();
  std::byte* copy = parts_.snapshot;
  for (auto param = updates.begin(); param != copied_end; ++param) {
    await_update(*param, request.version);
    parts_.states.read_from_copy(*param, copy);
    copy += parts_.states.planes(*param).bytes();
    release(*param);
  }
  SaveOrder order;
  order.params.assign(copied_end, updates.end());
  order.params.insert(order.params.end(), updates.begin(), copied_end);
  order.before = [&](int param) { await_update(param, request.version); };
  order.after = [this](int param) { release(param); };
  save_training(request.place, parts_.layout, parts_.states, request.training, order, parts_.ranks);
  if (parts_.tracer != nullptr && parts_.tracer->enabled()) {
    parts_.tracer->add(parts_.tracer->lane("save"), fmt::format("step {}", request.training.steps),
                       begin, Tracer::Clock::now());
  }
}

}  // namespace orlop
