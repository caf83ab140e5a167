#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
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

// Gradients that come together step after step. What their calls need is made once: their targets
// stay pinned, or not, as they are.
class GradientBatch {
 public:
  explicit GradientBatch(std::vector<std::shared_ptr<GradientTarget>> targets)
      : targets_(std::move(targets)) {
    for (const auto& target : targets_) {
      const size_t bytes = static_cast<size_t>(target->numel) * dtype_bytes(target->dtype);
      copies_.push_back({.to = pointer<void>(target->host), .bytes = bytes});
      gradients_.push_back({.dtype = target->dtype, .numel = target->numel});
      bytes_ += bytes;
    }
    scratch_bytes_ = device_square_sums_scratch_bytes(gradients_);
  }

  size_t bytes() const { return bytes_; }
  size_t scratch_bytes() const { return scratch_bytes_; }
  bool has_rows() const {
    return std::ranges::all_of(targets_, [](const auto& target) { return target->row >= 0; });
  }

  void square_sums(const std::vector<Address>& values, Address results, Address scratch, int device,
                   Address stream) {
    for (size_t i = 0; i < gradients_.size(); ++i) {
      const int64_t row = targets_[i]->row;
      if (row < 0) {
        throw Error(ErrorCode::kUsage, "square_sums: gradient " + std::to_string(i) + " has row " +
                                           std::to_string(row));
      }
      gradients_[i].values = pointer<const void>(values.at(i));
      gradients_[i].result = pointer<DeviceSquareSum>(results) + row;
    }
    device_square_sums(gradients_, pointer<void>(scratch), {device, pointer<void>(stream)});
  }

  void offload(const std::vector<Address>& values, int device, Address stream, Address behind,
               uint64_t gate, uint32_t version, Address results, Address scratch, Address arrival) {
    for (size_t i = 0; i < copies_.size(); ++i) {
      DeviceCopy& copy = copies_[i];
      copy.from = copy.device_from = pointer<const void>(values.at(i));
      if (!has_asked_ && copy.bytes > 0) copy.device_to = device_address(copy.to);
    }
    has_asked_ = true;
    device_copies(copies_, {device, pointer<void>(stream)}, pointer<void>(behind), {gate, version},
                  pointer<void>(arrival));
    if (results != 0) square_sums(values, results, scratch, device, behind);
  }

 private:
  std::vector<std::shared_ptr<GradientTarget>> targets_;
  std::vector<DeviceCopy> copies_;
  std::vector<DeviceGradient> gradients_;
  bool has_asked_ = false;  // where the device reaches the targets
  size_t bytes_ = 0;
  size_t scratch_bytes_ = 0;
};

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
  py::class_<GradientTarget, std::shared_ptr<GradientTarget>>(
      module, "GradientTarget",
      "What is known of a gradient (numel) before it is there: `host` is the memory that it leaves "
      "for, `row` where the sum of its squares goes, -1 while that has no place.")
      .def(py::init([](DType dtype, int64_t numel, Address host) {
             return std::make_shared<GradientTarget>(
                 GradientTarget{.dtype = dtype, .numel = numel, .host = host});
           }),
           py::arg("dtype"), py::arg("numel"), py::arg("host") = 0)
      .def_readonly("dtype", &GradientTarget::dtype)
      .def_readonly("numel", &GradientTarget::numel)
      .def_readwrite("row", &GradientTarget::row);
  py::class_<GradientBatch>(module, "GradientBatch",
                            "Gradients that come together; `values` are their addresses, in the "
                            "order of the targets. For one thread at a time.")
      .def(py::init<std::vector<std::shared_ptr<GradientTarget>>>(), py::arg("targets"))
      .def_property_readonly("bytes", &GradientBatch::bytes)
      .def_property_readonly("scratch_bytes", &GradientBatch::scratch_bytes,
                             "Device memory that square_sums needs, zero before its first use.")
      .def_property_readonly("has_rows", &GradientBatch::has_rows)
      .def("square_sums", &GradientBatch::square_sums, py::arg("values"), py::arg("results"),
           py::arg("scratch"), py::arg("device"), py::arg("stream"), Release(),
           "Issues the sums of their squares. `results` is device memory, 16 bytes a row: an fp64 "
           "sum and the int64 index of the first NaN or Inf, or -1.")
      .def("offload", &GradientBatch::offload, py::arg("values"), py::arg("device"),
           py::arg("stream"), py::arg("behind"), py::arg("gate") = 0, py::arg("version") = 0,
           py::arg("results") = 0, py::arg("scratch") = 0, py::arg("arrival") = 0, Release(),
           "device_copies to their targets, behind which the cudaEvent_t `arrival` is recorded, "
           "and, with `results`, square_sums on `behind`.");
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
