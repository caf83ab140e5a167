#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/sanitized.h"

namespace orlop::test {

// A child process that runs a program; its standard output comes line by line. Killed and reaped at
// the end of its life here.
class ChildProcess {
 public:
  // `command` is the program's path and its arguments.
  explicit ChildProcess(const std::vector<std::string>& command);
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  // The next line without its end; empty at the end of the output.
  std::optional<std::string> read_line();
  // Reads until a line that starts with `prefix`; false when the output ends before.
  bool read_until(const std::string& prefix);

  // SIGKILL.
  void kill();
  // Waits for the end; the exit status, or minus the signal.
  int wait();

 private:
  pid_t pid_ = -1;
  int output_ = -1;
  std::string buffer_;
  std::optional<int> status_;
};

// The command that runs `ranks` processes of a program on this machine by Open MPI's `mpiexec`. The
// launcher keeps the others alive when one rank dies, so that they must notice by themselves.
std::vector<std::string> mpi_command(const std::string& mpiexec, int ranks,
                                     const std::vector<std::string>& program);

// Starts `ranks` processes of a program on this machine, which find each other by sockets; no
// launcher looks after them.
std::vector<std::unique_ptr<ChildProcess>> start_socket_ranks(
    int ranks, const std::vector<std::string>& program);

// Of this process, from /proc/self.
size_t resident_bytes();
size_t peak_resident_bytes();
size_t thread_count();
size_t open_files();

}  // namespace orlop::test
