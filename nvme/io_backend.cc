#include "nvme/io_backend.h"

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "base/log.h"
#include "nvme/posix_backend.h"
#ifdef ORLOP_HAVE_URING
#include "nvme/uring_backend.h"
#endif

namespace orlop::nvme {
namespace {

// More threads than this do not make a drive faster; each holds one request.
constexpr unsigned kMaxThreads = 16;

#ifdef ORLOP_HAVE_URING
std::unique_ptr<IoBackend> make_uring(unsigned depth) {
  return std::make_unique<UringBackend>(depth);
}
#else
std::unique_ptr<IoBackend> make_uring(unsigned /*depth*/) {
  fail(ErrorCode::kIo,
       "io_uring is not part of this build; rebuild with liburing 2.3 or later, or set nvme.engine "
       "to auto or threads");
}
#endif

IoBackendDecorator& decorator() {
  static IoBackendDecorator decorator;
  return decorator;
}

BackendChoice choose_backend(IoEngine engine, unsigned depth) {
  BackendChoice choice;
  if (engine == IoEngine::kUring) {
    choice.backend = make_uring(depth);
    return choice;
  }
  if (engine == IoEngine::kAuto) {
    try {
      choice.backend = make_uring(depth);
      return choice;
    } catch (const Error& error) {
      choice.reason = error.what();
      static std::atomic<bool> said{false};
      if (!said.exchange(true)) {
        log_info("swapping with reads and writes on threads: {}", choice.reason);
      }
    }
  }
  choice.backend = std::make_unique<PosixBackend>(std::min(depth, kMaxThreads));
  return choice;
}

}  // namespace

IoEngine parse_io_engine(std::string_view text) {
  if (text == "auto") return IoEngine::kAuto;
  if (text == "io_uring") return IoEngine::kUring;
  if (text == "threads") return IoEngine::kThreads;
  fail(ErrorCode::kUsage, "nvme.engine is \"{}\"; use auto, io_uring or threads", text);
}

BackendChoice make_io_backend(IoEngine engine, unsigned depth) {
  check(depth > 0, ErrorCode::kUsage, "nvme.queue_depth is 0; use 1 or more");
  BackendChoice choice = choose_backend(engine, depth);
  if (decorator()) choice.backend = decorator()(std::move(choice.backend));
  return choice;
}

void decorate_io_backends(IoBackendDecorator wrap) { decorator() = std::move(wrap); }

std::string explain_uring_error(std::string_view call, int error, int disabled_sysctl) {
  std::string cause;
  if (error == EPERM && disabled_sysctl > 0) {
    cause = fmt::format("the sysctl kernel.io_uring_disabled is {}; set it to 0", disabled_sysctl);
  } else if (error == EPERM || error == EACCES) {
    cause =
        "a seccomp profile, usually the container's, forbids it; allow io_uring_setup, "
        "io_uring_enter and io_uring_register in the profile";
  } else if (error == ENOSYS) {
    cause =
        "the kernel is older than 5.6 or built without io_uring, or a seccomp profile hides it; "
        "use a newer kernel or another profile";
  } else if (error == ENOMEM) {
    rlimit limit{};
    getrlimit(RLIMIT_MEMLOCK, &limit);
    cause =
        fmt::format("the limit of locked memory is {}; raise it (ulimit -l)",
                    limit.rlim_cur == RLIM_INFINITY ? "unlimited" : format_bytes(limit.rlim_cur));
  } else {
    cause = "the kernel refuses it";
  }
  return fmt::format("{} failed: {} (errno {}): {}, or set nvme.engine to auto or threads", call,
                     errno_text(error), error, cause);
}

}  // namespace orlop::nvme
