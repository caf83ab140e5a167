#pragma once

#include <cstddef>
#include <cstring>
#include <new>
#include <type_traits>

namespace orlop::host {

// A closure kept by value in a fixed buffer, so that issuing work never allocates. Only closures
// that are plain bytes (pointers, sizes, argument structs) fit; they need no destructor.
class InlineTask {
 public:
  static constexpr size_t kBytes = 256;

  InlineTask() = default;

  // `name` is a literal: it names the work in the trace and in errors.
  template <typename Work>
  InlineTask(const char* name, const Work& work) : name_(name) {
    static_assert(sizeof(Work) <= kBytes, "the closure is larger than a task's buffer");
    static_assert(alignof(Work) <= alignof(std::max_align_t));
    static_assert(std::is_trivially_copyable_v<Work> && std::is_trivially_destructible_v<Work>,
                  "a queued closure must be plain bytes");
    new (storage_) Work(work);
    run_ = [](std::byte* storage) { (*std::launder(reinterpret_cast<Work*>(storage)))(); };
  }

  void run() { run_(storage_); }
  const char* name() const { return name_; }

 private:
  void (*run_)(std::byte*) = nullptr;
  const char* name_ = "";
  alignas(std::max_align_t) std::byte storage_[kBytes];
};

}  // namespace orlop::host
