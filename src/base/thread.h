#pragma once

#include <sched.h>

#include <functional>
#include <span>
#include <string>
#include <thread>

namespace orlop {

// Starts a thread that carries `name` (15 characters are visible) in debuggers and in the trace.
// Signals stay with the main thread. Nothing may escape `body`; an escaping exception ends the
// process.
std::thread start_thread(std::string name, std::function<void()> body);

// While it lives, the thread that has made it, and every thread that it starts, runs on these
// logical CPUs alone; what they touch first lies near them. No CPUs: nothing changes.
class AffinityScope {
 public:
  explicit AffinityScope(std::span<const int> cpus);
  AffinityScope(const AffinityScope&) = delete;
  AffinityScope& operator=(const AffinityScope&) = delete;
  ~AffinityScope();

 private:
  bool is_set_ = false;
  cpu_set_t before_{};
};

// Name given to start_thread, or "main".
const std::string& this_thread_name();

}  // namespace orlop
