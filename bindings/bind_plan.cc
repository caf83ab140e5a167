#include <pybind11/stl.h>

#include "bindings/bind.h"
#include "orlop/hardware.h"
#include "orlop/plan.h"
#include "orlop/stats.h"

namespace py = pybind11;

namespace orlop::python {

void bind_plan(py::module_& module) {
  py::class_<PlanLine>(module, "PlanLine", "Bytes of one purpose in one tier.")
      .def_readonly("tier", &PlanLine::tier)
      .def_readonly("purpose", &PlanLine::purpose)
      .def_readonly("bytes", &PlanLine::bytes);

  py::class_<PlanLane>(
      module, "PlanLane",
      "Time one queue is busy in a simulated step, and how long compute waits for it.")
      .def_readonly("queue", &PlanLane::queue)
      .def_readonly("busy_seconds", &PlanLane::busy_seconds)
      .def_readonly("stall_seconds", &PlanLane::stall_seconds);

  py::class_<PlanReport>(
      module, "PlanReport",
      "What a run will need and take. Memory is a promise that the run keeps; time is "
      "a prediction. str() is the table that `orlop plan` prints.")
      .def_readonly("model", &PlanReport::model)
      .def_readonly("device", &PlanReport::device)
      .def_readonly("evaluates_only", &PlanReport::evaluates_only)
      .def_readonly("parameters", &PlanReport::parameters)
      .def_readonly("ranks", &PlanReport::ranks)
      .def_readonly("gradient_wire", &PlanReport::gradient_wire)
      .def_readonly("tokens_per_step", &PlanReport::tokens_per_step)
      .def_readonly("device_peak_bytes", &PlanReport::device_peak_bytes)
      .def_readonly("device_fixed_bytes", &PlanReport::device_fixed_bytes)
      .def_readonly("device_budget_bytes", &PlanReport::device_budget_bytes)
      .def_readonly("host_bytes", &PlanReport::host_bytes)
      .def_readonly("host_budget_bytes", &PlanReport::host_budget_bytes)
      .def_readonly("host_pinned_bytes", &PlanReport::host_pinned_bytes)
      .def_readonly("nvme_bytes", &PlanReport::nvme_bytes)
      .def_readonly("nvme_budget_bytes", &PlanReport::nvme_budget_bytes)
      .def_readonly("nvme_read_bytes", &PlanReport::nvme_read_bytes)
      .def_readonly("nvme_written_bytes", &PlanReport::nvme_written_bytes)
      .def_readonly("state_bytes", &PlanReport::state_bytes)
      .def_readonly("lines", &PlanReport::lines)
      .def_readonly("blocks", &PlanReport::blocks)
      .def_readonly("resident_blocks", &PlanReport::resident_blocks)
      .def_readonly("device_optimizer_blocks", &PlanReport::device_optimizer_blocks)
      .def_readonly("nvme_optimizer_blocks", &PlanReport::nvme_optimizer_blocks)
      .def_readonly("nvme_param_blocks", &PlanReport::nvme_param_blocks)
      .def_readonly("nvme_optimizer_share", &PlanReport::nvme_optimizer_share)
      .def_readonly("nvme_param_share", &PlanReport::nvme_param_share)
      .def_readonly("prefetch_depth", &PlanReport::prefetch_depth)
      .def_readonly("waves", &PlanReport::waves)
      .def_readonly("activations", &PlanReport::activations)
      .def_readonly("forward_flops", &PlanReport::forward_flops)
      .def_readonly("matmul_flop_per_s", &PlanReport::matmul_flop_per_s)
      .def_readonly("save_bytes", &PlanReport::save_bytes)
      .def_readonly("save_seconds", &PlanReport::save_seconds)
      .def_readonly("save_stall_seconds", &PlanReport::save_stall_seconds)
      .def_readonly("updates_in_backward", &PlanReport::updates_in_backward)
      .def_readonly("step_seconds", &PlanReport::step_seconds)
      .def_readonly("compute_seconds", &PlanReport::compute_seconds)
      .def_readonly("optimizer_seconds", &PlanReport::optimizer_seconds)
      .def_readonly("lanes", &PlanReport::lanes)
      .def_readonly("time_is_measured", &PlanReport::time_is_measured)
      .def_readonly("profile", &PlanReport::profile)
      .def("to_text", &PlanReport::to_text)
      .def("to_json", &PlanReport::to_json)
      .def("__str__", &PlanReport::to_text);

  py::class_<MeasuredHardware>(module, "MeasuredHardware", "The profile as JSON, and its file.")
      .def_readonly("json", &MeasuredHardware::json)
      .def_readonly("path", &MeasuredHardware::path);
  module.def(
      "measure_hardware",
      [](const std::string& device, int threads, const std::string& drive) {
        return measure_hardware({device, threads, drive});
      },
      py::arg("device") = "auto", py::arg("threads") = 0, py::arg("drive") = "",
      py::call_guard<py::gil_scoped_release>(),
      "Measures what plans predict times from and keeps it for later plans; `drive` is a directory "
      "on the drive to measure.");

  py::class_<Stats>(module, "Stats", "Counters since the engine was opened.")
      .def_readonly("steps", &Stats::steps)
      .def_readonly("skipped_steps", &Stats::skipped_steps)
      .def_readonly("uploaded_bytes", &Stats::uploaded_bytes)
      .def_readonly("offloaded_bytes", &Stats::offloaded_bytes)
      .def_readonly("nvme_read_bytes", &Stats::nvme_read_bytes)
      .def_readonly("nvme_written_bytes", &Stats::nvme_written_bytes)
      .def_readonly("nvme_written_today_bytes", &Stats::nvme_written_today_bytes)
      .def_readonly("device_peak_bytes", &Stats::device_peak_bytes)
      .def_readonly("host_bytes", &Stats::host_bytes)
      .def_readonly("optimizer_seconds", &Stats::optimizer_seconds)
      .def_readonly("optimizer_exposed_seconds", &Stats::optimizer_exposed_seconds)
      .def_readonly("swap_wait_seconds", &Stats::swap_wait_seconds)
      .def_readonly("save_held_seconds", &Stats::save_held_seconds);
}

}  // namespace orlop::python
