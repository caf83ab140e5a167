#pragma once

#include <cstdint>
#include <string>

namespace orlop::nvme {

// What tells a living process from a dead one whose number was given out again.
struct ProcessIdentity {
  int64_t pid = 0;
  uint64_t start_ticks = 0;    // clock ticks after boot at which it started
  uint64_t pid_namespace = 0;  // inode; numbers are comparable inside one namespace only
  std::string boot_id;         // changes with every start of the machine
  std::string host;

  bool operator==(const ProcessIdentity&) const = default;
};

ProcessIdentity this_process();

enum class Liveness : uint8_t { kAlive, kDead, kUnknown };

// kUnknown for a process of another namespace that was started in this boot.
Liveness liveness(const ProcessIdentity& process);

// Still there, but on its way out or not yet waited for by its parent: what it holds is free soon.
bool is_ending(const ProcessIdentity& process);

}  // namespace orlop::nvme
