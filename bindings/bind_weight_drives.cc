#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/addresses.h"
#include "bindings/bind.h"
#include "bindings/weight_drives_handle.h"
#include "orlop/weight_drives.h"

namespace py = pybind11;

namespace orlop::python {
namespace {

int64_t add(WeightDrivesHandle& self, const std::vector<std::string>& names,
            const std::vector<size_t>& sizes) {
  std::vector<DriveWeight> weights;
  for (size_t i = 0; i < names.size(); ++i) weights.push_back({names[i], sizes.at(i)});
  return self.get().add(weights);
}

uint32_t fetch(WeightDrivesHandle& self, const std::vector<int64_t>& weights, size_t slot,
               Address wait, Address handle) {
  return self.get().fetch(weights, slot, make_fence(wait, handle));
}

// The bytes of a slot as an array that keeps them.
py::array_t<uint8_t> slot(WeightDrivesHandle& self, size_t index, size_t bytes) {
  auto* data = reinterpret_cast<uint8_t*>(self.get().slot(index));
  auto* owner = new std::shared_ptr<WeightDrives>(self.drives);
  const py::capsule base(
      owner, [](void* held) { delete static_cast<std::shared_ptr<WeightDrives>*>(held); });
  return py::array_t<uint8_t>(static_cast<py::ssize_t>(bytes), data, base);
}

}  // namespace

void bind_weight_drives(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  using Handle = WeightDrivesHandle;
  py::class_<Handle>(module, "WeightDrives",
                     "Weights on drives, and the slots of host memory that they come up through. "
                     "Addresses are those of host memory.")
      .def(py::init([](const StateDrives& drives) {
             const py::gil_scoped_release release;
             return std::make_unique<Handle>(std::make_shared<WeightDrives>(drives));
           }),
           py::arg("drives"))
      .def("add", &add, py::arg("names"), py::arg("sizes"), Release(),
           "Takes space for weights of so many bytes; returns the index of the first.")
      .def(
          "write",
          [](Handle& self, int64_t weight, Address values, size_t bytes) {
            self.get().write(weight, {pointer<const std::byte>(values), bytes});
          },
          py::arg("weight"), py::arg("values"), py::arg("bytes"), Release())
      .def(
          "read",
          [](Handle& self, int64_t weight, Address values, size_t bytes) {
            self.get().read(weight, {pointer<std::byte>(values), bytes});
          },
          py::arg("weight"), py::arg("values"), py::arg("bytes"), Release())
      .def_static(
          "slot_bytes",
          [](const std::vector<size_t>& sizes) { return WeightDrives::slot_bytes(sizes); },
          py::arg("sizes"), "Of a slot in which weights of so many bytes lie together.")
      .def(
          "take_slots",
          [](Handle& self, size_t count, size_t bytes) { self.get().take_slots(count, bytes); },
          py::arg("count"), py::arg("bytes"), Release())
      .def("slot", &slot, py::arg("index"), py::arg("bytes"))
      .def("fetch", &fetch, py::arg("weights"), py::arg("slot"), py::arg("wait") = 0,
           py::arg("handle") = 0, Release(),
           "Submits: weights come into a slot once `wait` (an int(void*), 0: at once) returns 0. "
           "Returns the ticket of their arrival.")
      .def(
          "written_address",
          [](Handle& self, uint32_t) { return reinterpret_cast<Address>(self.get().fetched()); },
          py::arg("ticket"), "Of the word that reaches the ticket when its weights are there.")
      .def(
          "wait",
          [](Handle& self, const std::vector<uint32_t>& tickets) {
            for (const uint32_t ticket : tickets) self.get().wait(ticket);
          },
          py::arg("tickets"), Release())
      .def(
          "synchronize", [](Handle& self) { self.get().synchronize(); }, Release(),
          "Waits for all fetches; raises the first error.")
      .def("ranges",
           [](Handle& self) {
             std::vector<std::pair<Address, size_t>> ranges;
             for (const std::span<std::byte> range : self.get().ranges())
               ranges.emplace_back(reinterpret_cast<Address>(range.data()), range.size());
             return ranges;
           })
      .def(
          "close", [](Handle& self) { self.drives.reset(); }, Release(),
          "Gives files and memory up, unless an optimizer or an array still has them.");
}

}  // namespace orlop::python
