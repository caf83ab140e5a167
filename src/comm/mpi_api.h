#pragma once

#include "comm/transport.h"

// What liborlop_mpi.so exports. It is loaded on demand (dlopen) by a program of the same build, so
// that nothing else links MPI; find the function by the name below.
extern "C" {

// Joins the ranks that mpirun or srun has started. The calling thread alone uses the transport, but
// for wake(); the caller deletes it. MPI can be started once per process: a second call throws
// orlop::Error(kCommunicator), as does a start that fails.
orlop::Transport* orlop_make_mpi_transport(int lanes);
using OrlopMakeMpiTransport = orlop::Transport* (*)(int);
}
