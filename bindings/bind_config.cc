#include <pybind11/stl.h>

#include "bindings/bind.h"
#include "orlop/config.h"

namespace py = pybind11;

namespace orlop::python {
namespace {

void bind_enums(py::module_& module) {
  py::enum_<Precision>(module, "Precision", "Dtype of matmuls and of the weights on the device.")
      .value("F32", Precision::kF32)
      .value("BF16", Precision::kBF16)
      .value("F16", Precision::kF16);
  py::enum_<DType>(module, "DType")
      .value("F32", DType::kF32)
      .value("F16", DType::kF16)
      .value("BF16", DType::kBF16);
  py::enum_<ScheduleKind>(module, "ScheduleKind", "Course of the learning rate after warm-up.")
      .value("CONSTANT", ScheduleKind::kConstant)
      .value("LINEAR", ScheduleKind::kLinear)
      .value("COSINE", ScheduleKind::kCosine)
      .value("WSD", ScheduleKind::kWsd);
  py::enum_<Tier>(module, "Tier", "Where a state lives; host means pinned host memory.")
      .value("DEVICE", Tier::kDevice)
      .value("HOST", Tier::kHost)
      .value("NVME", Tier::kNvme);
}

void bind_optimizer(py::module_& module) {
  py::class_<OptimizerConfig> optimizer(
      module, "OptimizerConfig",
      "AdamW as torch.optim.AdamW computes it; Adam with L2 when not decoupled. weight_decay is "
      "not applied to norms and biases. max_grad_norm 0 switches clipping off: in bf16 and fp32 "
      "updates then start inside backward, and a gradient that is not finite leaves its own block "
      "as it is instead of all.");
  def_keyword_init<OptimizerConfig>(optimizer);
  optimizer.def_readwrite("learning_rate", &OptimizerConfig::learning_rate)
      .def_readwrite("beta1", &OptimizerConfig::beta1)
      .def_readwrite("beta2", &OptimizerConfig::beta2)
      .def_readwrite("eps", &OptimizerConfig::eps)
      .def_readwrite("weight_decay", &OptimizerConfig::weight_decay)
      .def_readwrite("decoupled", &OptimizerConfig::decoupled)
      .def_readwrite("moments", &OptimizerConfig::moments)
      .def_readwrite("max_grad_norm", &OptimizerConfig::max_grad_norm);

  py::class_<ScheduleConfig> schedule(module, "ScheduleConfig",
                                      "min_lr_ratio: final rate over peak rate. decay_ratio: share "
                                      "of total_steps in which WSD decays.");
  def_keyword_init<ScheduleConfig>(schedule);
  schedule.def_readwrite("kind", &ScheduleConfig::kind)
      .def_readwrite("warmup_steps", &ScheduleConfig::warmup_steps)
      .def_readwrite("total_steps", &ScheduleConfig::total_steps)
      .def_readwrite("min_lr_ratio", &ScheduleConfig::min_lr_ratio)
      .def_readwrite("decay_ratio", &ScheduleConfig::decay_ratio);
}

void bind_memory(py::module_& module) {
  py::class_<LimitsConfig> limits(
      module, "LimitsConfig",
      "Hard budgets in bytes. None: all free device memory; all host "
      "memory that the cgroup allows, and all space that is free on the "
      "drives, less a reserve. nvme_writes_per_day_bytes: a step that "
      "would write more to the drives of this machine since midnight "
      "UTC is refused; None: no limit. snapshot_bytes, of the host's, hold copies of states that a "
      "save in the background makes so that updates need not wait "
      "until they are written.");
  def_keyword_init<LimitsConfig>(limits);
  limits.def_readwrite("device_bytes", &LimitsConfig::device_bytes)
      .def_readwrite("host_bytes", &LimitsConfig::host_bytes)
      .def_readwrite("nvme_bytes", &LimitsConfig::nvme_bytes)
      .def_readwrite("nvme_writes_per_day_bytes", &LimitsConfig::nvme_writes_per_day_bytes)
      .def_readwrite("snapshot_bytes", &LimitsConfig::snapshot_bytes);

  py::class_<NvmeConfig> nvme(
      module, "NvmeConfig",
      "Where states are swapped to that host memory does not hold: paths, one directory per drive; "
      "block_bytes of one request, a multiple of 4096; queue_depth requests in flight; direct: "
      "past "
      "the page cache where the file system takes it. engine: auto, io_uring or threads. verify: "
      "off, sample or full checksums of what is read.");
  def_keyword_init<NvmeConfig>(nvme);
  nvme.def_readwrite("paths", &NvmeConfig::paths)
      .def_readwrite("block_bytes", &NvmeConfig::block_bytes)
      .def_readwrite("queue_depth", &NvmeConfig::queue_depth)
      .def_readwrite("direct", &NvmeConfig::direct)
      .def_readwrite("engine", &NvmeConfig::engine)
      .def_readwrite("verify", &NvmeConfig::verify);

  py::class_<PlacementConfig> placement(
      module, "PlacementConfig",
      "What the planner decides by itself where a member is None. prefetch_depth: blocks uploaded "
      "ahead of compute, 0..8. resident_blocks, device_optimizer_blocks: whose weights, whose "
      "optimizer states are on the device. activations: the Tier of block inputs. wave: "
      "micro-batches per wave. nvme_optimizer_blocks, nvme_param_blocks: last blocks whose states, "
      "whose weights are on drives; nvme_optimizer_share, nvme_param_share: the share of each of "
      "them, 0..1, alone of every block. swap_chunk: elements that are swapped and updated "
      "together.");
  def_keyword_init<PlacementConfig>(placement);
  placement.def_readwrite("prefetch_depth", &PlacementConfig::prefetch_depth)
      .def_readwrite("resident_blocks", &PlacementConfig::resident_blocks)
      .def_readwrite("device_optimizer_blocks", &PlacementConfig::device_optimizer_blocks)
      .def_readwrite("activations", &PlacementConfig::activations)
      .def_readwrite("wave", &PlacementConfig::wave)
      .def_readwrite("nvme_optimizer_blocks", &PlacementConfig::nvme_optimizer_blocks)
      .def_readwrite("nvme_param_blocks", &PlacementConfig::nvme_param_blocks)
      .def_readwrite("nvme_optimizer_share", &PlacementConfig::nvme_optimizer_share)
      .def_readwrite("nvme_param_share", &PlacementConfig::nvme_param_share)
      .def_readwrite("swap_chunk", &PlacementConfig::swap_chunk);
}

}  // namespace

void bind_config(py::module_& module) {
  bind_enums(module);
  bind_optimizer(module);
  bind_memory(module);

  py::class_<BatchConfig> batch(
      module, "BatchConfig",
      "micro_batch_size sequences of sequence_length tokens; accumulation_steps of them per step.");
  def_keyword_init<BatchConfig>(batch);
  batch.def_readwrite("micro_batch_size", &BatchConfig::micro_batch_size)
      .def_readwrite("sequence_length", &BatchConfig::sequence_length)
      .def_readwrite("accumulation_steps", &BatchConfig::accumulation_steps);

  py::class_<EngineConfig> engine(
      module, "EngineConfig",
      "device: auto, host, cuda or cuda:N. gradient_wire: what gradients travel as between ranks, "
      "F32 or BF16 (half the bytes; every contribution is rounded once). threads 0: every usable "
      "core. reference_ops: plain loops "
      "instead of oneDNN (host only). from_scratch: random weights instead of "
      "the folder's. evaluate_only: no masters, moments or gradients; the engine only evaluates "
      "and exports. max_skipped_steps non-finite "
      "steps in a row end the run. seed: random weights and stochastic rounding. checkpoint_dir, "
      "checkpoint_room: where room for so many checkpoints, beside those that are there, is "
      "checked "
      "at the start.");
  def_keyword_init<EngineConfig>(engine);
  engine.def_readwrite("device", &EngineConfig::device)
      .def_readwrite("precision", &EngineConfig::precision)
      .def_readwrite("gradient_wire", &EngineConfig::gradient_wire)
      .def_readwrite("batch", &EngineConfig::batch)
      .def_readwrite("optimizer", &EngineConfig::optimizer)
      .def_readwrite("schedule", &EngineConfig::schedule)
      .def_readwrite("limits", &EngineConfig::limits)
      .def_readwrite("nvme", &EngineConfig::nvme)
      .def_readwrite("placement", &EngineConfig::placement)
      .def_readwrite("threads", &EngineConfig::threads)
      .def_readwrite("reference_ops", &EngineConfig::reference_ops)
      .def_readwrite("from_scratch", &EngineConfig::from_scratch)
      .def_readwrite("evaluate_only", &EngineConfig::evaluate_only)
      .def_readwrite("max_skipped_steps", &EngineConfig::max_skipped_steps)
      .def_readwrite("seed", &EngineConfig::seed)
      .def_readwrite("checkpoint_dir", &EngineConfig::checkpoint_dir)
      .def_readwrite("checkpoint_room", &EngineConfig::checkpoint_room);
}

}  // namespace orlop::python
