#include "base/thread.h"

#include <pthread.h>

#include <csignal>
#include <utility>

namespace orlop {
namespace {

std::string& name_slot() {
  thread_local std::string name = "main";
  return name;
}

}  // namespace

std::thread start_thread(std::string name, std::function<void()> body) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread([name = std::move(name), body = std::move(body)] {
    name_slot() = name;
    pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
    body();
  });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

AffinityScope::AffinityScope(std::span<const int> cpus) {
  if (cpus.empty() || sched_getaffinity(0, sizeof before_, &before_) != 0) return;
  cpu_set_t wanted;
  CPU_ZERO(&wanted);
  for (const int cpu : cpus) {
    if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(static_cast<size_t>(cpu), &wanted);
  }
  is_set_ = sched_setaffinity(0, sizeof wanted, &wanted) == 0;
}

AffinityScope::~AffinityScope() {
  if (is_set_) sched_setaffinity(0, sizeof before_, &before_);
}

const std::string& this_thread_name() { return name_slot(); }

}  // namespace orlop
