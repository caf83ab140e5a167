#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "comm/mpi_api.h"

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
// several have set must agree. Throws Error(kUsage) that names the variables when one is missing,
// is no number, lies outside its range or contradicts another.
RankIds read_rank_ids(const Environment& environment);

// Joins the ranks of `ids` through MPI, for devices whose memory the CPU reads and writes. Throws
// Error(kCommunicator) when the MPI part of Orlop cannot be loaded or the world that MPI makes is
// not the one that the launcher announced.
std::unique_ptr<HostCommunicator> join_through_mpi(const RankIds& ids, const MpiOptions& options);

}  // namespace orlop
