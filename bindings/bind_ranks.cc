#include <pybind11/pybind11.h>

#include <memory>

#include "bindings/bind.h"
#include "orlop/ranks.h"

namespace py = pybind11;

namespace orlop::python {

void bind_ranks(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<Ranks>(module, "Ranks",
                    "The processes that torchrun, mpirun or srun has started together; one "
                    "without a launcher. All ranks make the same calls in the same order.")
      .def(py::init([] {
        prepare_to_join();
        const py::gil_scoped_release release;
        return std::make_unique<Ranks>();
      }))
      .def_property_readonly("rank", &Ranks::rank)
      .def_property_readonly("world_size", &Ranks::world_size)
      .def("barrier", &Ranks::barrier, py::arg("what"), Release(),
           "Returns when every rank has called it.")
      .def("from_first", &Ranks::from_first, py::arg("value"), Release(),
           "What rank 0 gives, on every rank.")
      .def("any", &Ranks::any, py::arg("value"), Release(), "Whether any rank gives True.");
}

}  // namespace orlop::python
