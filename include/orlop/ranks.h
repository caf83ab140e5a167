#pragma once

#include <memory>
#include <string>

#include "orlop/export.h"

namespace orlop {

class Communicator;

// The ranks that this process belongs to, as torchrun, mpirun or srun has started them; one without
// a launcher. They meet at ORLOP_RENDEZVOUS=host:port where that is set (rank 0 listens there),
// else by MPI. For what a training loop does beside its Engine. All ranks make it, and make the
// same calls in the same order; a rank that fails or ends makes the calls of the others throw
// Error(kCommunicator).
class ORLOP_EXPORT Ranks {
 public:
  Ranks();
  ~Ranks();

  int rank() const;
  int world_size() const;

  // Returns when every rank has called it. `what` names the place in errors.
  void barrier(const std::string& what);

  // What rank 0 gives, on every rank.
  std::string from_first(const std::string& value);

  // Whether any rank gives true.
  bool any(bool value);

 private:
  std::shared_ptr<Communicator> ranks_;
};

}  // namespace orlop
