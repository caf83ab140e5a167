#include <string>
#include <string_view>

#include "bindings/bind.h"
#include "orlop/engine.h"
#include "orlop/version.h"

namespace {

// A part of another installation may lie in the package, or where LD_LIBRARY_PATH looks before it.
void require_own_library() {
  if (std::string_view(orlop::version()) == ORLOP_VERSION) return;
  throw pybind11::import_error(
      std::string("this Python package is of Orlop ") + ORLOP_VERSION +
      ", the liborlop.so that the loader found of Orlop " + orlop::version() +
      "; install Orlop again, and take the folder of another one out of LD_LIBRARY_PATH");
}

}  // namespace

PYBIND11_MODULE(_orlop, module) {
  require_own_library();
  module.doc() = "The public API of liborlop.";
  module.attr("__version__") = ORLOP_VERSION;
  module.attr("IGNORED_LABEL") = orlop::kIgnoredLabel;
  orlop::python::bind_errors(module);
  orlop::python::bind_config(module);
  orlop::python::bind_plan(module);
  orlop::python::bind_data(module);
  orlop::python::bind_engine(module);
  orlop::python::bind_ranks(module);
  orlop::python::bind_async_file(module);
  orlop::python::bind_drives(module);
  orlop::python::bind_tensor_optimizer(module);
  orlop::python::bind_weight_drives(module);
  orlop::python::bind_device_optimizer(module);
}
