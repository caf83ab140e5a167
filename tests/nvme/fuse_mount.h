#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

#include "support.h"

namespace orlop::nvme {

// A directory behind a file system in user space, served by a process of its own: names, reads,
// writes and lengths, and no more than a plain one has (nothing can be allocated ahead). mounted()
// is false where the machine does not let tests mount; why() tells the reason.
class FuseMount {
 public:
  FuseMount();
  ~FuseMount();
  FuseMount(const FuseMount&) = delete;
  FuseMount& operator=(const FuseMount&) = delete;

  bool mounted() const { return server_ > 0; }
  const std::string& why() const { return why_; }
  std::string path() const { return base_ / "mounted"; }

 private:
  TempDir base_;
  std::string why_;
  pid_t server_ = -1;
};

}  // namespace orlop::nvme
