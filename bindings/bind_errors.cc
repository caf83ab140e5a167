#include "bindings/bind.h"
#include "orlop/error.h"

namespace py = pybind11;

namespace orlop::python {
namespace {

// The key of the exception class in orlop.errors.BY_CODE.
const char* code_name(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInternal:
      return "internal";
    case ErrorCode::kUsage:
      return "usage";
    case ErrorCode::kDoesNotFit:
      return "does_not_fit";
    case ErrorCode::kInvalidData:
      return "invalid_data";
    case ErrorCode::kIo:
      return "io";
    case ErrorCode::kOutOfMemory:
      return "out_of_memory";
    case ErrorCode::kDevice:
      return "device";
    case ErrorCode::kCommunicator:
      return "communicator";
    case ErrorCode::kNonFinite:
      return "non_finite";
  }
  return "internal";
}

}  // namespace

void bind_errors(py::module_& module) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      const py::object by_code = py::module_::import("orlop.errors").attr("BY_CODE");
      const py::object type = by_code[code_name(error.code())];
      PyErr_SetString(type.ptr(), error.what());
    }
  });
  // For the test that both tables of exit codes agree.
  module.def("_exit_codes", [] {
    py::dict codes;
    for (int code = 0; code <= static_cast<int>(ErrorCode::kNonFinite); ++code) {
      const auto error_code = static_cast<ErrorCode>(code);
      codes[code_name(error_code)] = exit_code(error_code);
    }
    return codes;
  });
}

}  // namespace orlop::python
