#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/addresses.h"
#include "bindings/bind.h"
#include "orlop/cpu_adam.h"
#include "orlop/device_optimizer.h"
#include "orlop/error.h"

namespace py = pybind11;

namespace orlop::python {
namespace {

// What is known of a gradient before backward has written it.
struct GradientTarget {
  DType dtype = DType::kF32;
  int64_t numel = 0;
  Address host = 0;  // memory that it leaves for, or 0
  int64_t row = -1;  // of the sum of its squares; -1: none yet
};
using Targets = std::vector<std::reference_wrapper<const GradientTarget>>;

// What the size of their scratch depends on.
std::vector<DeviceGradient> make_gradients(const Targets& targets) {
  std::vector<DeviceGradient> gradients;
  gradients.reserve(targets.size());
  for (const GradientTarget& target : targets) {
    gradients.push_back({.dtype = target.dtype, .numel = target.numel});
  }
  return gradients;
}

size_t square_sums_scratch_bytes(const Targets& targets) {
  return device_square_sums_scratch_bytes(make_gradients(targets));
}

void square_sums(const Targets& targets, const std::vector<Address>& values, Address results,
                 Address scratch, int device, Address stream) {
  std::vector<DeviceGradient> gradients = make_gradients(targets);
  for (size_t i = 0; i < gradients.size(); ++i) {
    const int64_t row = targets[i].get().row;
    if (row < 0) {
      throw Error(ErrorCode::kUsage, "device_square_sums: gradient " + std::to_string(i) +
                                         " has row " + std::to_string(row));
    }
    gradients[i].values = pointer<const void>(values.at(i));
    gradients[i].result = pointer<DeviceSquareSum>(results) + row;
  }
  device_square_sums(gradients, pointer<void>(scratch), {device, pointer<void>(stream)});
}

void adam_steps(const std::vector<AdamShard>& shards, const std::vector<AdamHyper>& hypers,
                float grad_scale, Address scratch, int device, Address stream) {
  for (size_t i = 0; i < shards.size(); ++i) {
    device_adam_step(shards[i], hypers.at(i), grad_scale, pointer<void>(scratch),
                     {device, pointer<void>(stream)});
  }
}

void offload(const Targets& targets, const std::vector<Address>& values, int device, Address stream,
             Address behind, uint64_t gate, uint32_t version) {
  std::vector<DeviceCopy> copies;
  copies.reserve(targets.size());
  for (size_t i = 0; i < targets.size(); ++i) {
    const GradientTarget& target = targets[i];
    copies.push_back({pointer<void>(target.host), pointer<const void>(values.at(i)),
                      static_cast<size_t>(target.numel) * dtype_bytes(target.dtype)});
  }
  device_copies(copies, {device, pointer<void>(stream)}, pointer<void>(behind), {gate, version});
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
      "Brings the code of device_square_sums and device_copies to a device, so that their first "
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
  py::class_<GradientTarget>(module, "GradientTarget",
                             "What is known of a gradient (numel) before it is there: `host` is "
                             "the memory that it leaves for, `row` where the sum of its squares "
                             "goes, -1 while that has no place.")
      .def(py::init([](DType dtype, int64_t numel, Address host) {
             return GradientTarget{.dtype = dtype, .numel = numel, .host = host};
           }),
           py::arg("dtype"), py::arg("numel"), py::arg("host") = 0)
      .def_readonly("dtype", &GradientTarget::dtype)
      .def_readonly("numel", &GradientTarget::numel)
      .def_readwrite("row", &GradientTarget::row);
  module.def("square_sums_scratch_bytes", &square_sums_scratch_bytes, py::arg("targets"),
             "Device memory that device_square_sums needs.");
  module.def("device_square_sums", &square_sums, py::arg("targets"), py::arg("values"),
             py::arg("results"), py::arg("scratch"), py::arg("device"), py::arg("stream"),
             Release(),
             "Issues the sums of squares of the gradients at the addresses `values`. `results` is "
             "device memory, 16 bytes a row: an fp64 sum and the int64 index of the first NaN or "
             "Inf, or -1.");
  module.def("offload_gradients", &offload, py::arg("targets"), py::arg("values"),
             py::arg("device"), py::arg("stream"), py::arg("behind"), py::arg("gate") = 0,
             py::arg("version") = 0, Release(),
             "device_copies of the gradients at the addresses `values` to their targets.");
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
