#include "bindings/bind.h"
#include "orlop/engine.h"

PYBIND11_MODULE(_orlop, module) {
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
