#include "comm/rendezvous.h"

#include <array>
#include <charconv>
#include <cstdlib>
#include <vector>

#include "base/check.h"
#include "base/shared_library.h"
#include "comm/mpi_api.h"
#include "comm/socket_transport.h"

namespace orlop {
namespace {

constexpr const char* kMpiLibrary = "liborlop_mpi.so";
constexpr const char* kRendezvous = "ORLOP_RENDEZVOUS";
constexpr const char* kRendezvousFd = "ORLOP_RENDEZVOUS_FD";
// What the agent of torchrun sets for the processes that it starts.
constexpr const char* kTorchAgent = "TORCHELASTIC_RUN_ID";

struct Names {
  Launcher launcher;
  const char* rank;
  const char* world_size;
  const char* local_rank;
};

constexpr std::array<Names, 3> kLaunchers = {{
    {Launcher::kTorchrun, "RANK", "WORLD_SIZE", "LOCAL_RANK"},
    {Launcher::kMpirun, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK"},
    {Launcher::kSrun, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"},
}};

int parse(const char* name, const std::string& text) {
  int value = -1;
  const char* end = text.data() + text.size();
  const auto [next, error] = std::from_chars(text.data(), end, value);
  check(error == std::errc() && next == end && value >= 0, ErrorCode::kUsage,
        "the environment says {}='{}'; it must be a number of at least 0", name, text);
  return value;
}

// Nothing when the launcher is not at work. A batch script of Slurm has a SLURM_PROCID too; the
// number of tasks of a step is what only srun sets.
std::optional<RankIds> read(const Names& names, const Environment& environment) {
  const bool is_srun = names.launcher == Launcher::kSrun;
  const auto world_size = environment(names.world_size);
  const auto rank = environment(names.rank);
  const auto local_rank = environment(names.local_rank);
  if (!world_size && (is_srun || (!rank && !local_rank))) return std::nullopt;
  std::vector<const char*> missing;
  if (!rank) missing.push_back(names.rank);
  if (!world_size) missing.push_back(names.world_size);
  if (!local_rank) missing.push_back(names.local_rank);
  check(missing.empty(), ErrorCode::kUsage,
        "the environment is half that of a run with several ranks: {} is not set beside {}, {} and "
        "{}; start the ranks with {}, or unset all of them",
        fmt::join(missing, " and "), names.rank, names.world_size, names.local_rank,
        launcher_name(names.launcher));
  const RankIds ids{names.launcher, parse(names.rank, *rank), parse(names.world_size, *world_size),
                    parse(names.local_rank, *local_rank)};
  check(ids.world_size >= 1 && ids.rank < ids.world_size && ids.local_rank <= ids.rank,
        ErrorCode::kUsage,
        "the environment contradicts itself: {}={}, {}={}, {}={}; the rank must be below the world "
        "size and the local rank no higher than the rank",
        names.rank, ids.rank, names.world_size, ids.world_size, names.local_rank, ids.local_rank);
  return ids;
}

std::unique_ptr<HostCommunicator> join_by_mpi(const RankIds& ids, const MessageOptions& options) {
  static SharedLibrary library(kMpiLibrary);
  const auto make = library.find<OrlopMakeMpiTransport>("orlop_make_mpi_transport");
  check(library.loaded(), ErrorCode::kCommunicator,
        "{} has started {} ranks, but the MPI part of Orlop cannot be loaded: {}; install a build "
        "with MPI, set {}=host:port to an address where rank 0 listens, or start one process",
        launcher_name(ids.launcher), ids.world_size, library.error(), kRendezvous);
  auto communicator = std::make_unique<MessageCommunicator>(
      options, [&] { return std::unique_ptr<Transport>(make(MessageCommunicator::kLanes)); });
  check(
      communicator->world_size() == ids.world_size && communicator->rank() == ids.rank,
      ErrorCode::kCommunicator,
      "{} says rank {} of {}, but MPI has made rank {} of {}: this process was started by another "
      "MPI than the one that Orlop is built with",
      launcher_name(ids.launcher), ids.rank, ids.world_size, communicator->rank(),
      communicator->world_size());
  return communicator;
}

}  // namespace

const char* launcher_name(Launcher launcher) {
  switch (launcher) {
    case Launcher::kNone:
      return "no launcher";
    case Launcher::kTorchrun:
      return "torchrun";
    case Launcher::kMpirun:
      return "mpirun";
    case Launcher::kSrun:
      return "srun";
  }
  return "?";
}

std::optional<std::string> process_environment(const std::string& name) {
  const char* value = std::getenv(name.c_str());  // NOLINT(concurrency-mt-unsafe): nobody sets it
  if (value == nullptr) return std::nullopt;
  return value;
}

RankIds read_rank_ids(const Environment& environment) {
  RankIds found;
  for (const Names& names : kLaunchers) {
    const std::optional<RankIds> ids = read(names, environment);
    if (!ids) continue;
    check(found.launcher == Launcher::kNone ||
              (ids->rank == found.rank && ids->world_size == found.world_size),
          ErrorCode::kUsage,
          "the environment contradicts itself: rank {} of {} by {}, rank {} of {} by {}",
          found.rank, found.world_size, launcher_name(found.launcher), ids->rank, ids->world_size,
          launcher_name(ids->launcher));
    // The last is what has started this process: its world is MPI's.
    found = *ids;
    if (names.launcher == Launcher::kTorchrun && environment(kTorchAgent)) break;
  }
  return found;
}

std::unique_ptr<HostCommunicator> join_ranks_of(const RankIds& ids, const Environment& environment,
                                                const MessageOptions& options,
                                                double join_seconds) {
  const auto rendezvous = environment(kRendezvous);
  if (!rendezvous) {
    check(ids.launcher != Launcher::kTorchrun, ErrorCode::kUsage,
          "this process is rank {} of {}, but {} does not say where the ranks meet: `import orlop` "
          "and the command set it under torchrun; elsewhere set it to host:port, where rank 0 "
          "listens",
          ids.rank, ids.world_size, kRendezvous);
    return join_by_mpi(ids, options);
  }
  SocketOptions sockets{.rank = ids.rank,
                        .world_size = ids.world_size,
                        .rendezvous = *rendezvous,
                        .join_seconds = join_seconds};
  const auto listener = environment(kRendezvousFd);
  if (ids.rank == 0 && listener) sockets.listener = parse(kRendezvousFd, *listener);
  return std::make_unique<MessageCommunicator>(options, [&] {
    return std::make_unique<SocketTransport>(sockets, MessageCommunicator::kLanes);
  });
}

}  // namespace orlop
