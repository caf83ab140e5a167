#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "comm/message_communicator.h"

namespace orlop {

enum class Launcher : uint8_t { kNone, kTorchrun, kMpirun, kSrun };
const char* launcher_name(Launcher launcher);

// What a launcher tells one process of a run.
struct RankIds {
  Launcher launcher = Launcher::kNone;
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;  // among the ranks of this machine: the GPU to take

  bool operator==(const RankIds&) const = default;
};

using Environment = std::function<std::optional<std::string>(const std::string& name)>;
std::optional<std::string> process_environment(const std::string& name);

// Reads what torchrun (RANK, WORLD_SIZE, LOCAL_RANK), mpirun (OMPI_COMM_WORLD_*) or srun
// (SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID) have set; without any of them one rank. What
// several have set must agree, except below torchrun's agent (TORCHELASTIC_RUN_ID), which another
// launcher may have started once per machine. Throws Error(kUsage) that names the variables when
// one is missing, is no number, lies outside its range or contradicts another.
RankIds read_rank_ids(const Environment& environment);

// Joins the ranks of `ids`, for devices whose memory the CPU reads and writes: by sockets where
// ORLOP_RENDEZVOUS=host:port says where rank 0 listens (or takes over ORLOP_RENDEZVOUS_FD, a socket
// that listens there already), else by MPI under mpirun and srun. Throws Error(kUsage) when the
// environment names no way, Error(kCommunicator) when the ranks do not find each other within
// `join_seconds` (sockets), the MPI part of Orlop cannot be loaded or the world that MPI makes is
// not the one that the launcher announced.
std::unique_ptr<HostCommunicator> join_ranks_of(const RankIds& ids, const Environment& environment,
                                                const MessageOptions& options,
                                                double join_seconds = 300);

}  // namespace orlop
