#include "orlop/error.h"

namespace orlop {

Error::Error(ErrorCode code, const std::string& message)
    : std::runtime_error(message), code_(code) {}

Error::~Error() = default;

int exit_code(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::kUsage:
      return 2;
    case ErrorCode::kDoesNotFit:
      return 3;
    case ErrorCode::kInvalidData:
      return 4;
    default:
      return 1;
  }
}

}  // namespace orlop
