#pragma once

#include <functional>
#include <string>
#include <thread>

namespace orlop {

// Starts a thread that carries `name` (15 characters are visible) in debuggers and in the trace.
// Signals stay with the main thread. Nothing may escape `body`; an escaping exception ends the
// process.
std::thread start_thread(std::string name, std::function<void()> body);

// Name given to start_thread, or "main".
const std::string& this_thread_name();

}  // namespace orlop
