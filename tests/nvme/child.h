#pragma once

#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <exception>
#include <functional>
#include <string>

namespace orlop::nvme {

// Runs `body` in a forked process and returns what it returned, "error: <text>" for an exception,
// or "signal <number>".
inline std::string run_in_child(const std::function<std::string()>& body) {
  int ends[2];
  if (::pipe(ends) != 0) return "no pipe";
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(ends[0]);
    std::string report;
    try {
      report = body();
    } catch (const std::exception& error) {
      report = std::string("error: ") + error.what();
    }
    const ssize_t ignored = ::write(ends[1], report.data(), report.size());
    ::_exit(ignored < 0 ? 1 : 0);
  }
  ::close(ends[1]);
  std::string report;
  char piece[512];
  ssize_t got = 0;
  while ((got = ::read(ends[0], piece, sizeof piece)) > 0) {
    report.append(piece, static_cast<size_t>(got));
  }
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? "signal " + std::to_string(WTERMSIG(status)) : report;
}

// A process that runs `body` and then waits to be killed; the constructor returns once `body` has.
class KillableChild {
 public:
  explicit KillableChild(const std::function<void()>& body) {
    int ends[2];
    if (::pipe(ends) != 0) return;
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(ends[0]);
      bool right = true;
      try {
        body();
      } catch (const std::exception&) {
        right = false;
      }
      const char answer = right ? '+' : '-';
      if (::write(ends[1], &answer, 1) != 1) ::_exit(1);
      while (true) ::pause();
    }
    ::close(ends[1]);
    char answer = 0;
    ready_ = ::read(ends[0], &answer, 1) == 1 && answer == '+';
    ::close(ends[0]);
  }
  ~KillableChild() { kill(); }
  KillableChild(const KillableChild&) = delete;
  KillableChild& operator=(const KillableChild&) = delete;

  bool ready() const { return ready_; }
  pid_t pid() const { return pid_; }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_ = -1;
  bool ready_ = false;
};

}  // namespace orlop::nvme
