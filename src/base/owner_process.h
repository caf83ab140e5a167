#pragma once

#include <unistd.h>

#include <cstdint>
#include <string_view>

#include "base/check.h"

namespace orlop {

// Forks between the first process and this one. Asking costs a load, where getpid() is a call of
// the system, and a slow one in some sandboxes.
uint64_t fork_generation();

// The process that made an object with threads and mappings of its own. A forked child inherits a
// copy of the object, but neither of those: it must leave the copy alone, and not destroy it.
class OwnerProcess {
 public:
  bool is_this() const { return fork_generation() == generation_; }

  // Throws Error(kUsage). `what` is what the user calls the object: "engine".
  void check_this(std::string_view what) const {
    check(is_this(), ErrorCode::kUsage,
          "this {} belongs to process {} and was inherited by a fork; use it there only", what,
          pid_);
  }

 private:
  uint64_t generation_ = fork_generation();
  pid_t pid_ = ::getpid();
};

}  // namespace orlop
