#include <pybind11/pybind11.h>

#include <string>

#include "bindings/bind.h"
#include "orlop/swapper.h"

namespace py = pybind11;

namespace orlop::python {

// Buffers are addresses; the caller keeps their memory until wait(). Every call that may wait gives
// up the interpreter lock.
void bind_async_file(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  using Address = uintptr_t;
  py::class_<AsyncFile>(module, "AsyncFile",
                        "Reads and writes buffers from and to files, deep in "
                        "the queue of the drive. Addresses and bytes.")
      .def(py::init([](size_t block_bytes, unsigned queue_depth, const std::string& engine) {
             AsyncFileOptions options;
             options.block_bytes = block_bytes;
             options.queue_depth = queue_depth;
             options.engine = engine;
             return std::make_unique<AsyncFile>(options);
           }),
           py::arg("block_bytes") = size_t{1} << 20, py::arg("queue_depth") = 128,
           py::arg("engine") = "auto", Release())
      .def(
          "pread",
          [](AsyncFile& self, Address buffer, size_t bytes, const std::string& path, bool validate,
             bool async, uint64_t offset) {
            return self.pread(reinterpret_cast<void*>(buffer), bytes, path, validate, async,
                              offset);
          },
          py::arg("buffer"), py::arg("bytes"), py::arg("path"), py::arg("validate"),
          py::arg("async_"), py::arg("offset") = 0, Release())
      .def(
          "pwrite",
          [](AsyncFile& self, Address buffer, size_t bytes, const std::string& path, bool validate,
             bool async, uint64_t offset) {
            return self.pwrite(reinterpret_cast<const void*>(buffer), bytes, path, validate, async,
                               offset);
          },
          py::arg("buffer"), py::arg("bytes"), py::arg("path"), py::arg("validate"),
          py::arg("async_"), py::arg("offset") = 0, Release())
      .def(
          "async_pread_fd",
          [](AsyncFile& self, Address buffer, size_t bytes, int fd, uint64_t offset) {
            return self.async_pread(reinterpret_cast<void*>(buffer), bytes, fd, offset);
          },
          py::arg("buffer"), py::arg("bytes"), py::arg("fd"), py::arg("offset") = 0, Release())
      .def(
          "async_pwrite_fd",
          [](AsyncFile& self, Address buffer, size_t bytes, int fd, uint64_t offset) {
            return self.async_pwrite(reinterpret_cast<const void*>(buffer), bytes, fd, offset);
          },
          py::arg("buffer"), py::arg("bytes"), py::arg("fd"), py::arg("offset") = 0, Release())
      .def("wait", &AsyncFile::wait, Release())
      .def(
          "new_cpu_locked_tensor",
          [](AsyncFile& self, size_t bytes) {
            return reinterpret_cast<Address>(self.new_cpu_locked_tensor(bytes));
          },
          py::arg("bytes"), Release())
      .def(
          "free_cpu_locked_tensor",
          [](AsyncFile& self, Address memory) {
            self.free_cpu_locked_tensor(reinterpret_cast<void*>(memory));
          },
          py::arg("memory"), Release())
      .def_property_readonly("block_bytes", &AsyncFile::block_bytes)
      .def_property_readonly("queue_depth", &AsyncFile::queue_depth)
      .def_property_readonly("alignment", &AsyncFile::alignment)
      .def_property_readonly("backend", &AsyncFile::backend)
      .def_property_readonly("backend_reason", &AsyncFile::backend_reason);
}

}  // namespace orlop::python
