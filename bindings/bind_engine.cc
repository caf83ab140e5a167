#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bind.h"
#include "orlop/engine.h"

namespace py = pybind11;

namespace orlop::python {
namespace {

// Every call that may wait gives up the interpreter lock, the destructor too: engine threads that
// finish late must never meet a Python thread that joins them under the lock.
using Release = py::call_guard<py::gil_scoped_release>;

// An engine that Python can close before its last reference goes.
class EngineHandle {
 public:
  explicit EngineHandle(std::unique_ptr<Engine> engine) : engine_(std::move(engine)) {}
  ~EngineHandle() {
    const py::gil_scoped_release release;
    engine_.reset();
  }
  EngineHandle(const EngineHandle&) = delete;
  EngineHandle& operator=(const EngineHandle&) = delete;

  Engine& get() {
    if (!engine_) throw Error(ErrorCode::kUsage, "this Engine is closed");
    return *engine_;
  }
  void close() { engine_.reset(); }

 private:
  std::unique_ptr<Engine> engine_;
};

py::array_t<float> read_state(EngineHandle& self, const std::string& name, StateKind kind) {
  for (const TensorDescription& tensor : self.get().tensors()) {
    if (tensor.name != name) continue;
    py::array_t<float> values(std::vector<py::ssize_t>(tensor.shape.begin(), tensor.shape.end()));
    const std::span<float> out(values.mutable_data(), static_cast<size_t>(values.size()));
    const py::gil_scoped_release release;
    self.get().read_state(name, kind, out);
    return values;
  }
  throw Error(ErrorCode::kUsage, "read_state: the model has no tensor named '" + name + "'");
}

void bind_results(py::module_& module) {
  py::class_<StepResult>(
      module, "StepResult",
      "loss: mean over the labelled tokens of the step, in nats. grad_norm: global, "
      "before clipping; clip: the factor that clipping applied. skipped: a gradient "
      "was not finite: with clipping, or in fp16, no state changed and the step does not count; "
      "else only its block stayed as it was. nonfinite: which tensor, or ''.")
      .def_readonly("step", &StepResult::step)
      .def_readonly("loss", &StepResult::loss)
      .def_readonly("grad_norm", &StepResult::grad_norm)
      .def_readonly("clip", &StepResult::clip)
      .def_readonly("learning_rate", &StepResult::learning_rate)
      .def_readonly("loss_scale", &StepResult::loss_scale)
      .def_readonly("skipped", &StepResult::skipped)
      .def_readonly("nonfinite", &StepResult::nonfinite)
      .def_readonly("tokens", &StepResult::tokens)
      .def_readonly("labelled_tokens", &StepResult::labelled_tokens)
      .def_readonly("seconds", &StepResult::seconds);

  py::class_<EvalResult>(module, "EvalResult", "loss: mean over the labelled tokens, in nats.")
      .def_readonly("loss", &EvalResult::loss)
      .def_readonly("labelled_tokens", &EvalResult::labelled_tokens);

  py::enum_<StateKind>(module, "StateKind")
      .value("MASTER", StateKind::kMaster)
      .value("EXP_AVG", StateKind::kExpAvg)
      .value("EXP_AVG_SQ", StateKind::kExpAvgSq);

  py::enum_<SaveMode>(module, "SaveMode", "When save_checkpoint returns.")
      .value("WAIT", SaveMode::kWait)
      .value("BACKGROUND", SaveMode::kBackground);

  py::class_<TensorDescription>(module, "TensorDescription")
      .def_readonly("name", &TensorDescription::name)
      .def_readonly("shape", &TensorDescription::shape)
      .def_readonly("weight_decay", &TensorDescription::weight_decay);
}

void bind_training(py::class_<EngineHandle>& engine) {
  engine
      .def_static(
          "open",
          [](const std::string& model_dir, const EngineConfig& config) {
            prepare_to_join();
            const py::gil_scoped_release release;
            return std::make_unique<EngineHandle>(Engine::open(model_dir, config));
          },
          py::arg("model_dir"), py::arg("config"),
          "Plans, takes the memory of the plan, reads the weights. Raises DoesNotFitError with the "
          "shortage per tier before anything big is allocated.")
      .def_property_readonly("plan", [](EngineHandle& self) { return self.get().plan(); })
      .def_property_readonly("config", [](EngineHandle& self) { return self.get().config(); })
      .def_property_readonly("rank", [](EngineHandle& self) { return self.get().rank(); })
      .def_property_readonly("world_size",
                             [](EngineHandle& self) { return self.get().world_size(); })
      .def_property_readonly("steps_done",
                             [](EngineHandle& self) { return self.get().steps_done(); })
      .def(
          "step",
          [](EngineHandle& self, const std::vector<MicroBatch>& batches) {
            return self.get().step(batches);
          },
          py::arg("batches"), Release(),
          "One optimizer step over accumulation_steps micro-batches (a last step may have fewer). "
          "The update may still run when this returns; whatever reads states waits for it.")
      .def(
          "synchronize", [](EngineHandle& self) { self.get().synchronize(); }, Release(),
          "Returns when the update of the last step is over and on its drives.")
      .def(
          "evaluate",
          [](EngineHandle& self, const std::vector<MicroBatch>& batches) {
            return self.get().evaluate(batches);
          },
          py::arg("batches"), Release(),
          "Mean loss over the labelled tokens, in nats, without touching any state.");
}

void bind_states(py::class_<EngineHandle>& engine) {
  engine
      .def(
          "tensors", [](EngineHandle& self) { return self.get().tensors(); }, Release(),
          "Descriptions in file order.")
      .def("read_state", &read_state, py::arg("tensor"), py::arg("kind") = StateKind::kMaster,
           "One state as a new fp32 array of the tensor's shape.")
      .def(
          "save_checkpoint",
          [](EngineHandle& self, const std::string& run_dir, const std::string& user_state,
             int keep,
             SaveMode mode) { return self.get().save_checkpoint(run_dir, user_state, keep, mode); },
          py::arg("run_dir"), py::arg("user_state") = "", py::arg("keep") = 3,
          py::arg("mode") = SaveMode::kWait, Release(),
          "Writes run_dir/step-N and keeps the newest `keep`. Returns the folder. In the "
          "background it is written beside the steps that follow; an error is raised, once, by the "
          "next call.")
      .def(
          "wait_for_save", [](EngineHandle& self) { self.get().wait_for_save(); }, Release(),
          "Returns when no save runs. Raises the error of the one that ran.")
      .def(
          "load_checkpoint",
          [](EngineHandle& self, const std::string& step_dir) {
            return self.get().load_checkpoint(step_dir);
          },
          py::arg("step_dir"), Release(),
          "Reads one step-N folder, whatever placement and number of ranks wrote it. Returns its "
          "user_state.")
      .def_static("latest_checkpoint", &Engine::latest_checkpoint, py::arg("run_dir"), Release(),
                  "The complete checkpoint of a run that was written last, or ''.")
      .def(
          "export_hf",
          [](EngineHandle& self, const std::string& out_dir, size_t max_shard_bytes) {
            self.get().export_hf(out_dir, max_shard_bytes);
          },
          py::arg("out_dir"), py::arg("max_shard_bytes") = size_t{5} << 30, Release(),
          "Writes a complete Hugging Face folder: weights in the engine's precision, in files of "
          "max_shard_bytes at most.");
}

}  // namespace

void bind_engine(py::module_& module) {
  bind_results(module);
  module.def(
      "plan",
      [](const std::string& model_dir, const EngineConfig& config, int ranks) {
        return Engine::plan(model_dir, config, ranks);
      },
      py::arg("model_dir"), py::arg("config"), py::arg("ranks") = 1, Release(),
      "The plan that Engine.open() would make, from config.json alone; for each of `ranks` on this "
      "machine.");

  py::class_<EngineHandle> engine(module, "Engine",
                                  "Trains one model from a Hugging Face folder. Called by one "
                                  "thread at a time. After a failed step "
                                  "it refuses further steps; the last checkpoint is as it was. "
                                  "Several ranks open it, step, evaluate, read_state, "
                                  "save_checkpoint, load_checkpoint and export_hf together, in "
                                  "the same order; all else each does alone. Where one makes "
                                  "another call than the rest, all are told both.");
  bind_training(engine);
  bind_states(engine);
  engine
      .def(
          "stats", [](EngineHandle& self) { return self.get().stats(); }, Release(),
          "Counters since the engine was opened.")
      .def(
          "start_trace", [](EngineHandle& self) { self.get().start_trace(); }, Release(),
          "Records one lane per queue and thread until write_trace().")
      .def(
          "write_trace",
          [](EngineHandle& self, const std::string& path) { self.get().write_trace(path); },
          py::arg("path"), Release(), "Chrome trace JSON since start_trace.")
      .def("close", &EngineHandle::close, Release(), "Frees everything; further calls raise.")
      .def("__enter__", [](const py::object& self) { return self; })
      .def("__exit__", [](EngineHandle& self, const py::args&) {
        const py::gil_scoped_release release;
        self.close();
      });
}

}  // namespace orlop::python
