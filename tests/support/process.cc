#include "tests/support/process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "base/check.h"
#include "base/unique_fd.h"
#include "comm/socket_address.h"

extern char** environ;

namespace orlop::test {
namespace {

// A figure that the file states in KiB.
size_t field_bytes(const char* path, const std::string& field) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    size_t kib = 0;
    if (word == field && file >> kib) return kib * 1024;
  }
  fail(ErrorCode::kInternal, "'{}' has no {}", path, field);
}

size_t entries(const char* folder) {
  const std::filesystem::directory_iterator begin(folder);
  return static_cast<size_t>(std::distance(begin, std::filesystem::directory_iterator()));
}

}  // namespace

ChildProcess::ChildProcess(const std::vector<std::string>& command) {
  int ends[2];
  check(::pipe2(ends, O_CLOEXEC) == 0, ErrorCode::kInternal, "pipe: {}", errno_text(errno));
  std::vector<char*> arguments;
  for (const std::string& argument : command) {
    arguments.push_back(const_cast<char*>(argument.c_str()));
  }
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  const int error =
      ::posix_spawn(&pid_, command.front().c_str(), &actions, nullptr, arguments.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  ::close(ends[1]);
  output_ = ends[0];
  check(error == 0, ErrorCode::kInternal, "cannot start '{}': {}", command.front(),
        errno_text(error));
}

ChildProcess::~ChildProcess() {
  if (!status_) {
    kill();
    wait();
  }
  ::close(output_);
}

std::optional<std::string> ChildProcess::read_line() {
  while (true) {
    const size_t end = buffer_.find('\n');
    if (end != std::string::npos) {
      std::string line = buffer_.substr(0, end);
      buffer_.erase(0, end + 1);
      return line;
    }
    char piece[512];
    const ssize_t got = ::read(output_, piece, sizeof piece);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return std::nullopt;
    buffer_.append(piece, static_cast<size_t>(got));
  }
}

bool ChildProcess::read_until(const std::string& prefix) {
  while (const auto line = read_line()) {
    if (line->starts_with(prefix)) return true;
  }
  return false;
}

void ChildProcess::kill() { ::kill(pid_, SIGKILL); }

int ChildProcess::wait() {
  if (status_) return *status_;
  int status = 0;
  while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  status_ = WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
  return *status_;
}

// status counts in steps; smaps_rollup is exact.
std::vector<std::string> mpi_command(const std::string& mpiexec, int ranks,
                                     const std::vector<std::string>& program) {
  std::vector<std::string> command = {mpiexec, "-n", std::to_string(ranks), "--oversubscribe",
                                      "--enable-recovery"};
  // Shared memory without reading another process's, which containers forbid.
  for (const char* word :
       {"--mca", "btl", "self,vader", "--mca", "btl_vader_single_copy_mechanism", "none"}) {
    command.emplace_back(word);
  }
  command.insert(command.end(), program.begin(), program.end());
  return command;
}

std::vector<std::unique_ptr<ChildProcess>> start_socket_ranks(
    int ranks, const std::vector<std::string>& program) {
  const UniqueFd listener = listen_at(resolve("127.0.0.1:0").front());
  std::vector<std::unique_ptr<ChildProcess>> processes;
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<std::string> command = {
        "/usr/bin/env", fmt::format("RANK={}", rank), fmt::format("WORLD_SIZE={}", ranks),
        fmt::format("LOCAL_RANK={}", rank),
        fmt::format("ORLOP_RENDEZVOUS={}", SocketAddress::own(listener.get()).text())};
    if (rank == 0) command.push_back(fmt::format("ORLOP_RENDEZVOUS_FD={}", listener.get()));
    command.insert(command.end(), program.begin(), program.end());
    ::fcntl(listener.get(), F_SETFD, rank == 0 ? 0 : FD_CLOEXEC);
    processes.push_back(std::make_unique<ChildProcess>(command));
  }
  return processes;
}

size_t resident_bytes() { return field_bytes("/proc/self/smaps_rollup", "Rss:"); }
size_t peak_resident_bytes() { return field_bytes("/proc/self/status", "VmHWM:"); }
size_t thread_count() { return entries("/proc/self/task"); }
size_t open_files() { return entries("/proc/self/fd"); }

}  // namespace orlop::test
