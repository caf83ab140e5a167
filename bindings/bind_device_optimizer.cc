#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>
#include <vector>

#include "bindings/addresses.h"
#include "bindings/bind.h"
#include "orlop/cpu_adam.h"
#include "orlop/device_optimizer.h"

namespace py = pybind11;

namespace orlop::python {
namespace {

struct SquareSums {
  std::vector<DeviceGradient> gradients;  // of one device
};

SquareSums make_square_sums(const std::vector<std::tuple<Address, DType, int64_t>>& gradients,
                            const std::vector<int64_t>& rows, Address results) {
  SquareSums made;
  made.gradients.reserve(gradients.size());
  for (size_t i = 0; i < gradients.size(); ++i) {
    const auto& [values, dtype, numel] = gradients[i];
    made.gradients.push_back({pointer<const void>(values), dtype, numel,
                              pointer<DeviceSquareSum>(results) + rows.at(i)});
  }
  return made;
}

void adam_steps(const std::vector<AdamShard>& shards, const std::vector<AdamHyper>& hypers,
                float grad_scale, Address scratch, int device, Address stream) {
  for (size_t i = 0; i < shards.size(); ++i) {
    device_adam_step(shards[i], hypers.at(i), grad_scale, pointer<void>(scratch),
                     {device, pointer<void>(stream)});
  }
}

void copies(const std::vector<std::tuple<Address, Address, size_t>>& ranges, int device,
            Address stream, Address behind, uint64_t gate, uint32_t version) {
  std::vector<DeviceCopy> copies;
  copies.reserve(ranges.size());
  for (const auto& [to, from, bytes] : ranges) {
    copies.push_back({pointer<void>(to), pointer<const void>(from), bytes});
  }
  device_copies(copies, {device, pointer<void>(stream)}, pointer<void>(behind), {gate, version});
}

}  // namespace

void bind_device_optimizer(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  module.def(
      "device_load", &device_load, py::arg("device"), Release(),
      "Brings the code of DeviceSquareSums and device_copies to a device, so that their first "
      "calls wait for nothing.");
  module.def("check_device", &check_device, py::arg("device"), Release(),
             "Raises DeviceError where the CUDA part of Orlop, the driver or the device are not "
             "such that the calls "
             "below work, with the versions of both.");
  module.def("device_adam_scratch_bytes", &device_adam_scratch_bytes, Release(),
             "Device memory that device_adam_steps needs.");
  module.def("device_adam_steps", &adam_steps, py::arg("shards"), py::arg("hypers"),
             py::arg("grad_scale"), py::arg("scratch"), py::arg("device"), py::arg("stream"),
             Release(),
             "Issues one Adam step over the planes of each shard, in device memory; the bits are "
             "the host's.");
  py::class_<SquareSums>(module, "DeviceSquareSums",
                         "The sums of squares of gradients (address, dtype, numel). `results` is "
                         "device memory, 16 bytes a row: an fp64 sum and the int64 index of the "
                         "first NaN or Inf, or -1; `rows` tells the row of each.")
      .def(py::init(&make_square_sums), py::arg("gradients"), py::arg("rows"), py::arg("results"))
      .def_property_readonly(
          "scratch_bytes",
          [](const SquareSums& self) { return device_square_sums_scratch_bytes(self.gradients); })
      .def(
          "issue",
          [](const SquareSums& self, Address scratch, int device, Address stream) {
            device_square_sums(self.gradients, pointer<void>(scratch),
                               {device, pointer<void>(stream)});
          },
          py::arg("scratch"), py::arg("device"), py::arg("stream"), Release());
  module.def("device_copies", &copies, py::arg("copies"), py::arg("device"), py::arg("stream"),
             py::arg("behind"), py::arg("gate") = 0, py::arg("version") = 0, Release(),
             "Issues copies (to, from, bytes) between device and host memory on `stream`, behind "
             "what the stream `behind` was given so far, and once the 32-bit word at `gate`, an "
             "address on the device (0: none), has reached `version`.");
  module.def("adam_step", &adam_step, py::arg("shard"), py::arg("hyper"), py::arg("grad_scale"),
             py::arg("threads"), Release(), "One Adam step over planes in host memory.");

  py::class_<AdamShard> shard(module, "AdamShard", "Planes of one tensor, given by address.");
  def_keyword_init<AdamShard>(shard);
  shard.def_readwrite("compute_dtype", &AdamShard::compute_dtype)
      .def_readwrite("moment_dtype", &AdamShard::moment_dtype)
      .def_readwrite("grad_dtype", &AdamShard::grad_dtype)
      .def_readwrite("numel", &AdamShard::numel)
      .def_readwrite("rng_offset", &AdamShard::rng_offset);
  const auto plane = [&shard](const char* name, auto member) {
    shard.def_property(
        name, [member](const AdamShard& self) { return reinterpret_cast<Address>(self.*member); },
        [member](AdamShard& self, Address address) {
          self.*member = reinterpret_cast<std::remove_reference_t<decltype(self.*member)>>(address);
        });
  };
  plane("param", &AdamShard::param);
  plane("lo", &AdamShard::lo);
  plane("master", &AdamShard::master);
  plane("exp_avg", &AdamShard::exp_avg);
  plane("exp_avg_sq", &AdamShard::exp_avg_sq);
  plane("grad", &AdamShard::grad);
}

}  // namespace orlop::python
