#pragma once

#include <stdexcept>
#include <string>

#include "orlop/export.h"

namespace orlop {

enum class ErrorCode : int {
  kInternal,      // a broken promise inside the engine
  kUsage,         // an argument or a configuration that cannot work
  kDoesNotFit,    // a budget is too small; the message names shortage and remedy per tier
  kInvalidData,   // a model, checkpoint or data file that cannot be used
  kIo,            // a system call on a file failed
  kOutOfMemory,   // an allocation was refused at run time
  kDevice,        // the accelerator or its driver reported an error
  kCommunicator,  // a collective failed or ranks disagree
  kNonFinite,     // too many steps in a row with NaN or Inf
};

// The one exception type of the library. what() names operation, object, numbers and remedy.
class ORLOP_EXPORT Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message);
  ~Error() override;
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

// The process exit code of the command for an error: 2 usage, 3 would not fit, 4 data or checkpoint
// invalid, 1 anything else.
ORLOP_EXPORT int exit_code(ErrorCode code) noexcept;

}  // namespace orlop
