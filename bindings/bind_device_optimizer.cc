#include <pybind11/pybind11.h>

#include "bindings/bind.h"
#include "orlop/device_optimizer.h"

namespace py = pybind11;

namespace orlop::python {
namespace {

using Address = uintptr_t;

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

void bind_device_optimizer(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  module.def("device_optimizer_scratch_bytes", &device_optimizer_scratch_bytes, py::arg("numel"),
             Release(), "Device memory that device_adam_step and device_square_sum need.");
  module.def(
      "device_adam_step",
      [](const AdamShard& shard, const AdamHyper& hyper, float grad_scale, Address scratch,
         int device, Address stream) {
        device_adam_step(shard, hyper, grad_scale, pointer<void>(scratch),
                         {device, pointer<void>(stream)});
      },
      py::arg("shard"), py::arg("hyper"), py::arg("grad_scale"), py::arg("scratch"),
      py::arg("device"), py::arg("stream"), Release(),
      "Issues one Adam step over planes in device memory; the bits are the host's.");
  module.def(
      "device_square_sum",
      [](Address values, int64_t numel, Address result, Address scratch, int device,
         Address stream) {
        device_square_sum(pointer<const float>(values), numel, pointer<DeviceSquareSum>(result),
                          pointer<void>(scratch), {device, pointer<void>(stream)});
      },
      py::arg("values"), py::arg("numel"), py::arg("result"), py::arg("scratch"), py::arg("device"),
      py::arg("stream"), Release(),
      "Issues the sum of squares of fp32 values; `result` is 16 bytes of device memory: an fp64 "
      "sum "
      "and the int64 index of the first NaN or Inf, or -1.");

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
