#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/addresses.h"
#include "bindings/bind.h"
#include "bindings/weight_drives_handle.h"
#include "orlop/error.h"
#include "orlop/tensor_optimizer.h"

namespace py = pybind11;

namespace orlop::python {
namespace {

using Release = py::call_guard<py::gil_scoped_release>;
// The view was made of memory that Python may write.
std::span<float> elements(const GradientView& sum) {
  return {static_cast<float*>(const_cast<void*>(sum.data)), static_cast<size_t>(sum.numel)};
}

// A TensorOptimizer that Python can close, and the Python objects whose memory it works on: the
// weights for good, gradients until their update has been waited for.
class OptimizerHandle {
 public:
  OptimizerHandle(int threads, const StateDrives& drives)
      : optimizer_(std::make_unique<TensorOptimizer>(threads, drives)) {}
  ~OptimizerHandle() { close(); }
  OptimizerHandle(const OptimizerHandle&) = delete;
  OptimizerHandle& operator=(const OptimizerHandle&) = delete;

  TensorOptimizer& get() {
    if (!optimizer_) throw Error(ErrorCode::kUsage, "this optimizer is closed");
    return *optimizer_;
  }

  // Called with the interpreter lock, which is given up while the optimizer's thread ends.
  void close() {
    {
      const py::gil_scoped_release release;
      optimizer_.reset();
    }
    weights_.clear();
    in_flight_.clear();
  }

  int64_t add(const std::vector<TensorSpec>& specs, const py::list& weights) {
    int64_t first = 0;
    {
      const py::gil_scoped_release release;
      first = get().add(specs);
    }
    weights_.resize(static_cast<size_t>(first));
    for (const py::handle owner : weights) weights_.push_back(py::cast<py::object>(owner));
    weights_.resize(static_cast<size_t>(first) + specs.size());
    return first;
  }

  void move_weights(int64_t tensor, Address weights, const py::object& owner) {
    {
      const py::gil_scoped_release release;
      get().move_weights(tensor, pointer<void>(weights));
    }
    weights_[static_cast<size_t>(tensor)] = owner;
  }

  uint32_t update(const std::vector<TensorUpdate>& updates, float grad_scale, int64_t step,
                  const py::list& gradients) {
    uint32_t version = 0;
    {
      const py::gil_scoped_release release;
      version = get().update(updates, grad_scale, step);
    }
    for (const py::handle owner : gradients) in_flight_.push_back(py::cast<py::object>(owner));
    return version;
  }

  uint32_t accumulate(int64_t tensor, const GradientView& sum, bool add, bool last, Address wait,
                      Address handle, const py::object& owner) {
    return keep(owner, [&] {
      return get().accumulate(tensor, elements(sum), add, last, make_fence(wait, handle));
    });
  }

  uint32_t round_sum(int64_t tensor, const GradientView& sum, const py::object& owner) {
    return keep(owner, [&] { return get().round_sum(tensor, elements(sum)); });
  }

  uint32_t measure(const std::vector<int64_t>& tensors, Address wait, Address handle,
                   const py::object& owner) {
    return keep(owner, [&] { return get().measure(tensors, make_fence(wait, handle)); });
  }

  // Their weights, where they are Python's, stay referenced: they may be those of another tensor.
  void release(const std::vector<int64_t>& tensors) {
    const py::gil_scoped_release release;
    for (const int64_t tensor : tensors) get().release(tensor);
  }

  void synchronize() {
    {
      const py::gil_scoped_release release;
      get().synchronize();
    }
    in_flight_.clear();
  }

 private:
  // Submits without the interpreter lock; `owner` is referenced until synchronize().
  template <typename Submit>
  uint32_t keep(const py::object& owner, const Submit& submit) {
    in_flight_.push_back(owner);
    const py::gil_scoped_release release;
    return submit();
  }

  std::unique_ptr<TensorOptimizer> optimizer_;
  std::vector<py::object> weights_;  // by tensor
  std::vector<py::object> in_flight_;
};

StatePlane plane_named(const std::string& name) {
  if (name == "exp_avg") return StatePlane::kExpAvg;
  if (name == "exp_avg_sq") return StatePlane::kExpAvgSq;
  if (name == "lo" || name == "master") return StatePlane::kMasterRest;
  throw Error(ErrorCode::kUsage, "a tensor keeps no plane '" + name + "'");
}

// One plane as an array over the optimizer's memory, which the array keeps; None where the layout
// has no such plane. 16-bit floats come as uint16.
py::object plane(OptimizerHandle& self, int64_t tensor, const std::string& name, int64_t numel,
                 DType dtype) {
  const TensorStates states = self.get().states(tensor);
  const std::pair<const char*, void*> planes[] = {
      {"weights", states.weights},       {"lo", states.lo},
      {"master", states.master},         {"exp_avg", states.exp_avg},
      {"exp_avg_sq", states.exp_avg_sq}, {"gradient", states.gradient}};
  for (const auto& [known, data] : planes) {
    if (name != known) continue;
    if (data == nullptr && numel > 0) return py::none();
    auto* owner = new std::shared_ptr<const void>(self.get().memory(tensor));
    const py::capsule base(
        owner, [](void* held) { delete static_cast<std::shared_ptr<const void>*>(held); });
    if (dtype == DType::kF32) return py::array_t<float>(numel, static_cast<float*>(data), base);
    return py::array_t<uint16_t>(numel, static_cast<uint16_t*>(data), base);
  }
  throw Error(ErrorCode::kUsage, "a tensor has no plane '" + name + "'");
}

void bind_values(py::module_& module) {
  py::class_<StateDrives> drives(
      module, "StateDrives",
      "Drives for states that host memory does not hold (nvme: an NvmeConfig with paths), and the "
      "bytes of one slot and of all slots in host memory that they pass through.");
  def_keyword_init<StateDrives>(drives);
  drives.def_readwrite("nvme", &StateDrives::nvme)
      .def_readwrite("slot_bytes", &StateDrives::slot_bytes)
      .def_readwrite("host_bytes", &StateDrives::host_bytes);

  py::class_<AdamHyper> hyper(module, "AdamHyper",
                              "Hyperparameters of one update; step counts from 1. decoupled: "
                              "AdamW, else Adam with the decay in the gradient.");
  def_keyword_init<AdamHyper>(hyper);
  hyper.def_readwrite("lr", &AdamHyper::lr)
      .def_readwrite("beta1", &AdamHyper::beta1)
      .def_readwrite("beta2", &AdamHyper::beta2)
      .def_readwrite("eps", &AdamHyper::eps)
      .def_readwrite("weight_decay", &AdamHyper::weight_decay)
      .def_readwrite("decoupled", &AdamHyper::decoupled)
      .def_readwrite("maximize", &AdamHyper::maximize)
      .def_readwrite("step", &AdamHyper::step)
      .def_readwrite("seed", &AdamHyper::seed);

  py::class_<TensorSpec> spec(module, "TensorSpec",
                              "weights: address of the caller's host memory, or 0 for a copy that "
                              "the optimizer keeps.");
  def_keyword_init<TensorSpec>(spec);
  spec.def_readwrite("name", &TensorSpec::name)
      .def_readwrite("dtype", &TensorSpec::dtype)
      .def_readwrite("moment_dtype", &TensorSpec::moment_dtype)
      .def_readwrite("numel", &TensorSpec::numel)
      .def_readwrite("keep_gradient", &TensorSpec::keep_gradient)
      .def_readwrite("seed", &TensorSpec::seed)
      .def_readwrite("on_drives", &TensorSpec::on_drives)
      .def(
          "live_on",
          [](TensorSpec& self, const WeightDrivesHandle& drives, int64_t weight) {
            self.weight_drives = drives.drives;
            self.drive_weight = weight;
          },
          py::arg("drives"), py::arg("weight"), "The weights are those with this index there.")
      .def_property(
          "weights", [](const TensorSpec& self) { return reinterpret_cast<Address>(self.weights); },
          [](TensorSpec& self, Address address) { self.weights = pointer<void>(address); });

  py::class_<GradientView>(module, "GradientView", "A gradient in host memory.")
      .def(py::init([](Address data, DType dtype, int64_t numel) {
             return GradientView{pointer<void>(data), dtype, numel};
           }),
           py::arg("data"), py::arg("dtype"), py::arg("numel"));

  py::class_<TensorUpdate>(
      module, "TensorUpdate",
      "wait, handle: address of an int(void*) that returns 0 when the gradient "
      "has arrived, and its argument; 0: it is there. written: somebody else "
      "may have written weights or master in place since the last update.")
      .def(py::init([](int64_t tensor, const GradientView& gradient, const AdamHyper& hyper,
                       Address wait, Address handle, bool written) {
             return TensorUpdate{tensor, gradient, hyper, make_fence(wait, handle), written};
           }),
           py::arg("tensor"), py::arg("gradient"), py::arg("hyper"), py::arg("wait") = 0,
           py::arg("handle") = 0, py::arg("written") = true);
}

void bind_states(py::class_<OptimizerHandle>& optimizer) {
  optimizer
      .def("plane", &plane, py::arg("tensor"), py::arg("name"), py::arg("numel"), py::arg("dtype"),
           "A view of one plane that keeps its memory alive, or None.")
      .def(
          "written_address",
          [](OptimizerHandle& self, int64_t tensor) {
            return reinterpret_cast<Address>(self.get().states(tensor).written_version);
          },
          py::arg("tensor"))
      .def(
          "adopt_weights",
          [](OptimizerHandle& self, int64_t tensor, Address weights) {
            self.get().adopt_weights(tensor, pointer<void>(weights));
          },
          py::arg("tensor"), py::arg("weights"), Release())
      .def("move_weights", &OptimizerHandle::move_weights, py::arg("tensor"), py::arg("weights"),
           py::arg("owner"), "The weights lie at another address, in the memory of `owner`.")
      .def(
          "read_master",
          [](OptimizerHandle& self, int64_t tensor, int64_t numel) {
            py::array_t<float> values(numel);
            const std::span<float> out(values.mutable_data(), static_cast<size_t>(numel));
            const py::gil_scoped_release release;
            self.get().read_master(tensor, out);
            return values;
          },
          py::arg("tensor"), py::arg("numel"))
      .def(
          "write_master",
          [](OptimizerHandle& self, int64_t tensor,
             const py::array_t<float, py::array::c_style | py::array::forcecast>& values) {
            const std::span<const float> in(values.data(), static_cast<size_t>(values.size()));
            const py::gil_scoped_release release;
            self.get().write_master(tensor, in);
          },
          py::arg("tensor"), py::arg("values"))
      .def(
          "read_state",
          [](OptimizerHandle& self, int64_t tensor, const std::string& name, int64_t first,
             Address values, size_t bytes) {
            self.get().read_state(tensor, plane_named(name), first,
                                  {pointer<std::byte>(values), bytes});
          },
          py::arg("tensor"), py::arg("name"), py::arg("first"), py::arg("values"), py::arg("bytes"),
          Release(), "Copies elements of one plane, from `first` on, to an address.")
      .def(
          "write_state",
          [](OptimizerHandle& self, int64_t tensor, const std::string& name, int64_t first,
             Address values, size_t bytes) {
            self.get().write_state(tensor, plane_named(name), first,
                                   {pointer<std::byte>(values), bytes});
          },
          py::arg("tensor"), py::arg("name"), py::arg("first"), py::arg("values"), py::arg("bytes"),
          Release())
      .def(
          "piece_numel",
          [](OptimizerHandle& self, int64_t tensor, int64_t first) {
            return self.get().piece_numel(tensor, first);
          },
          py::arg("tensor"), py::arg("first"),
          "Elements from `first` on whose planes, read or written one after the other, move once.")
      .def("ranges",
           [](OptimizerHandle& self) {
             std::vector<std::pair<Address, size_t>> ranges;
             for (const std::span<std::byte> range : self.get().ranges()) {
               ranges.emplace_back(reinterpret_cast<Address>(range.data()), range.size());
             }
             return ranges;
           })
      .def("memory_report", [](OptimizerHandle& self) {
        py::dict report;
        for (const TensorMemory& held : self.get().memory_report()) {
          report[py::str(held.purpose)] = held.bytes;
        }
        return report;
      });
}

}  // namespace

void bind_tensor_optimizer(py::module_& module) {
  bind_values(module);
  module.def("default_threads", &default_threads,
             "Threads for host work: OMP_NUM_THREADS, or the physical cores of this process.");
  py::class_<OptimizerHandle> optimizer(module, "TensorOptimizer",
                                        "Adam for tensors that the caller owns; orlop.AdamW is "
                                        "built on it. Addresses are those of host memory.");
  bind_states(optimizer);
  optimizer
      .def(py::init<int, const StateDrives&>(), py::arg("threads") = 0,
           py::arg("drives") = StateDrives{})
      .def("add", &OptimizerHandle::add, py::arg("specs"), py::arg("weights"),
           "Takes memory for the states; `weights` are the objects that own the addresses. Returns "
           "the index of the first.")
      .def(
          "norm",
          [](OptimizerHandle& self, const std::vector<GradientView>& gradients) {
            const py::gil_scoped_release release;
            const GradientNorm norm = self.get().norm(gradients);
            return std::tuple{norm.square_sum, norm.first_tensor, norm.first_element};
          },
          py::arg("gradients"), "(sum of squares, first tensor with NaN or Inf or -1, element).")
      .def(
          "norms",
          [](OptimizerHandle& self, const std::vector<GradientView>& gradients) {
            const py::gil_scoped_release release;
            std::vector<std::pair<double, int64_t>> norms;
            norms.reserve(gradients.size());
            for (const GradientView& gradient : gradients) {
              const GradientNorm norm = self.get().norm({&gradient, 1});
              norms.emplace_back(norm.square_sum, norm.first_element);
            }
            return norms;
          },
          py::arg("gradients"), "(sum of squares, first NaN or Inf or -1) of each of them.")
      .def("update", &OptimizerHandle::update, py::arg("updates"), py::arg("grad_scale"),
           py::arg("step"), py::arg("gradients"),
           "Submits updates; `gradients` are referenced until synchronize().")
      .def("accumulate", &OptimizerHandle::accumulate, py::arg("tensor"), py::arg("sum"),
           py::arg("add"), py::arg("last") = false, py::arg("wait") = 0, py::arg("handle") = 0,
           py::arg("owner") = py::none(),
           "`sum` is the view of an F32 tensor; `owner` is referenced until synchronize(). `last`: "
           "round_sum() as well, in the same pass.")
      .def("round_sum", &OptimizerHandle::round_sum, py::arg("tensor"), py::arg("sum"),
           py::arg("owner"),
           "`sum` is the view of an F32 tensor; `owner` is referenced until synchronize().")
      .def("measure", &OptimizerHandle::measure, py::arg("tensors"), py::arg("wait") = 0,
           py::arg("handle") = 0, py::arg("owner") = py::none(),
           "Submits the norms of kept gradients; `owner` is referenced until synchronize().")
      .def("release", &OptimizerHandle::release, py::arg("tensors"),
           "Gives the states of these tensors up; planes that are still held keep their memory.")
      .def(
          "measured",
          [](OptimizerHandle& self, int64_t tensor) {
            const py::gil_scoped_release release;
            const GradientNorm norm = self.get().measured(tensor);
            return std::pair{norm.square_sum, norm.first_element};
          },
          py::arg("tensor"), "(sum of squares, first element with NaN or Inf or -1).")
      .def(
          "wait",
          [](OptimizerHandle& self, const std::vector<int64_t>& tensors) {
            const py::gil_scoped_release release;
            for (const int64_t tensor : tensors) self.get().wait(tensor);
          },
          py::arg("tensors"))
      .def("synchronize", &OptimizerHandle::synchronize)
      .def("close", &OptimizerHandle::close);
}

}  // namespace orlop::python
