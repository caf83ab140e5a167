#include <pybind11/stl.h>

#include "bindings/bind.h"
#include "orlop/drives.h"

namespace py = pybind11;

namespace orlop::python {

void bind_drives(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<DriveReport>(module, "DriveReport", "What a swap directory offers.")
      .def_readonly("directory", &DriveReport::directory)
      .def_readonly("file_system", &DriveReport::file_system)
      .def_readonly("device", &DriveReport::device)
      .def_readonly("direct", &DriveReport::direct)
      .def_readonly("why_not_direct", &DriveReport::why_not_direct)
      .def_readonly("free_bytes", &DriveReport::free_bytes)
      .def_readonly("total_bytes", &DriveReport::total_bytes)
      .def_readonly("percent_worn", &DriveReport::percent_worn);
  py::class_<IoReport>(module, "IoReport", "What the kernel grants swapping.")
      .def_readonly("engine", &IoReport::engine)
      .def_readonly("reason", &IoReport::reason)
      .def_readonly("memlock_bytes", &IoReport::memlock_bytes);
  py::class_<SweepPoint>(module, "SweepPoint")
      .def_readonly("block_bytes", &SweepPoint::block_bytes)
      .def_readonly("depth", &SweepPoint::depth)
      .def_readonly("read_gib_per_s", &SweepPoint::read_gib_per_s)
      .def_readonly("write_gib_per_s", &SweepPoint::write_gib_per_s);
  py::class_<SweepResult>(module, "SweepResult", "best: what to give nvme_block and queue depth.")
      .def_readonly("points", &SweepResult::points)
      .def_readonly("best", &SweepResult::best)
      .def_readonly("backend", &SweepResult::backend)
      .def_readonly("direct", &SweepResult::direct);
  module.def("report_drive", &report_drive, py::arg("directory"), Release());
  module.def("report_io", &report_io, Release());
  module.def(
      "sweep_aio",
      [](const std::string& directory, size_t file_bytes, int repeats, const std::string& engine,
         bool direct) {
        SweepOptions options;
        options.directory = directory;
        options.file_bytes = file_bytes;
        options.repeats = repeats;
        options.engine = engine;
        options.direct = direct;
        return sweep_aio(options);
      },
      py::arg("directory"), py::arg("file_bytes") = SweepOptions{}.file_bytes,
      py::arg("repeats") = 3, py::arg("engine") = "auto", py::arg("direct") = true, Release(),
      "Reads and writes one temporary file by block size and depth.");
}

}  // namespace orlop::python
