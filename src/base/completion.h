#pragma once

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "base/check.h"

namespace orlop {

struct Unit {};

// The outcome of one asynchronous operation: a value or the operation's own error. Copies share one
// outcome. Every operation that takes a Completion's promise ends it exactly once.
template <typename T = Unit>
class Completion {
 public:
  // An outcome that is already there.
  static Completion ready(T value = T{}) {
    Completion completion;
    completion.set_value(std::move(value));
    return completion;
  }

  Completion() : state_(std::make_shared<State>()) {}

  bool done() const {
    std::lock_guard lock(state_->mutex);
    return state_->done;
  }

  // Waits, then throws the operation's error or returns its value (moved out: call once per value).
  T wait() {
    std::unique_lock lock(state_->mutex);
    state_->changed.wait(lock, [this] { return state_->done; });
    if (state_->error) std::rethrow_exception(state_->error);
    return std::move(*state_->value);
  }

  // Waits and returns the error, or null.
  std::exception_ptr wait_error() const noexcept {
    std::unique_lock lock(state_->mutex);
    state_->changed.wait(lock, [this] { return state_->done; });
    return state_->error;
  }

  void set_value(T value = T{}) {
    finish([&](State& state) { state.value.emplace(std::move(value)); });
  }
  void set_error(std::exception_ptr error) {
    finish([&](State& state) { state.error = std::move(error); });
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    std::optional<T> value;
    std::exception_ptr error;
  };

  template <typename Fill>
  void finish(Fill&& fill) {
    std::lock_guard lock(state_->mutex);
    ORLOP_INVARIANT(!state_->done);
    fill(*state_);
    state_->done = true;
    state_->changed.notify_all();
  }

  std::shared_ptr<State> state_;
};

}  // namespace orlop
