#pragma once

#include <cstdint>

#include "comm/host_communicator.h"

// What liborlop_mpi.so exports. It is loaded on demand (dlopen) by a program of the same build, so
// that nothing else links MPI; find the function by the name below.
namespace orlop {

struct MpiOptions {
  HostCommunicator::Issue issue = nullptr;
  // A collective that a rank does not join for so long has failed, though the rank is alive.
  double timeout_seconds = 1800;
  // A rank that gives no sign of life for so long is dead. Signs are sent by a thread of their own,
  // also while the rank computes.
  double silence_seconds = 15;
};

}  // namespace orlop

extern "C" {

// Joins the ranks that mpirun or srun has started; the caller deletes the communicator, all ranks
// at about the same time. MPI can be started once per process: a second call throws
// orlop::Error(kCommunicator), as does a start that fails.
orlop::HostCommunicator* orlop_make_mpi_communicator(const orlop::MpiOptions* options);
using OrlopMakeMpiCommunicator = orlop::HostCommunicator* (*)(const orlop::MpiOptions*);
}
