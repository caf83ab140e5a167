"""Every key of DeepSpeed's configuration and what orlop.deepspeed_compat makes of it.

A: means the same here. B: accepted; the note tells what it becomes. R: refused unless it asks for nothing,
with the reason and the nearest alternative.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Key:
    grade: str
    default: Any
    note: str
    kind: type | tuple[type, ...] | None = None  # None: that of the default
    least: float = 0.0  # of a number, which is also below `below`
    below: float = math.inf
    numbers: int | None = None  # a list holds so many; 0: any count; None: no numbers
    choices: tuple[str, ...] | None = None
    endless: bool = False  # Infinity is taken, as None


_COMM = "one rank: nothing is communicated"
_STREAM = "weights are not partitioned: orlop.wrap sizes its own window"
_DRIVES = "with device nvme reads and writes always run beside the update"
_IO = "io_uring has no such split"
_ALWAYS = "always so"
_TUNE = "run `orlop plan`, which computes what autotuning tries"

KEYS: dict[str, Key] = {
    # batch
    "train_batch_size": Key("A", None, "micro batch * accumulation", int),
    "train_micro_batch_size_per_gpu": Key("A", None, "rows of a batch of the data loader", int),
    "gradient_accumulation_steps": Key("A", None, "backwards per step", int),
    "managed_gradient_accumulation": Key("A", True, "false: every step() updates, losses are not divided"),
    "dataloader_drop_last": Key("A", False, "of the data loader"),
    # optimizer, scheduler
    "optimizer.type": Key("A", None, "Adam, AdamW", str),
    "optimizer.params.lr": Key("A", 1e-3, "learning rate"),
    "optimizer.params.betas": Key("A", [0.9, 0.999], "betas", numbers=2, below=1.0),
    "optimizer.params.eps": Key("A", 1e-8, "eps"),
    "optimizer.params.weight_decay": Key("A", 0.0, "weight decay"),
    "optimizer.params.adam_w_mode": Key("A", True, "false: the decay goes into the gradient"),
    "optimizer.params.bias_correction": Key("R", True, "Adam without bias correction is not implemented"),
    "optimizer.params.amsgrad": Key("R", False, "DeepSpeedCPUAdam ignores it; Orlop does not keep the maximum"),
    "optimizer.params.torch_adam": Key("B", False, "the update equals torch's within rounding"),
    "optimizer.params.fused": Key("B", False, "the update equals torch's within rounding"),
    "optimizer.params.foreach": Key("B", False, "the update equals torch's within rounding"),
    "optimizer.params.set_grad_none": Key("B", True, _ALWAYS),
    "optimizer.params.max_grad_norm": Key("B", 0.0, "use gradient_clipping"),
    "optimizer.legacy_fusion": Key("B", False, _ALWAYS + " fused"),
    "zero_allow_untested_optimizer": Key("B", False, "torch.optim.Adam, AdamW and Orlop's own are taken"),
    "zero_force_ds_cpu_optimizer": Key("B", True, "torch's Adam and AdamW always become Orlop's"),
    "scheduler.type": Key("A", None, "WarmupLR, WarmupDecayLR, WarmupCosineLR", str),
    "scheduler.params": Key("A", {}, "of the scheduler"),
    # precision
    "fp16.enabled": Key("A", False, "fp16 weights, fp32 masters, loss scaling"),
    "fp16.auto_cast": Key("A", False, "inputs of forward become fp16"),
    "fp16.loss_scale": Key("A", 0.0, "0: dynamic"),
    "fp16.initial_scale_power": Key("A", 16, "first scale: 2 to this power"),
    "fp16.loss_scale_window": Key("A", 1000, "good steps until the scale doubles"),
    "fp16.hysteresis": Key("A", 2, "overflows until the scale halves"),
    "fp16.consecutive_hysteresis": Key("A", False, "a good step restores the hysteresis"),
    "fp16.min_loss_scale": Key("A", 1.0, "floor of the scale"),
    "fp16.fp16_master_weights_and_grads": Key("B", False, "masters stay fp32"),
    "bf16.enabled": Key("A", False, "bf16 weights, exact fp32 masters in two planes"),
    "bf16.check_grad_overflow": Key("A", True, "a step with NaN or Inf is left out"),
    "bf16.immediate_grad_update": Key("B", False, "gradients leave as soon as backward has them"),
    "bf16.bf16_master_weights_and_grads": Key("B", False, "masters stay exact, in 2 bytes beside the weight"),
    "bf16.bf16_optimizer_states": Key("A", False, "moments in bf16 with stochastic rounding"),
    "torch_autocast.enabled": Key("A", False, "forward runs under torch.autocast"),
    "torch_autocast.dtype": Key("A", "bfloat16", "bfloat16 or float16"),
    "torch_autocast.lower_precision_safe_modules": Key("B", [], "autocast decides by operation"),
    "data_types.grad_accum_dtype": Key("A", None, "fp32: micro-batches are summed in fp32 in host memory", str),
    "data_types.param_dtype": Key("B", None, "set bf16.enabled or fp16.enabled", str),
    "data_types.buffer_dtype": Key("B", None, "buffers follow module.to()", str),
    # clipping and communication
    "gradient_clipping": Key("A", 1.0, "2-norm over all gradients; 0: none"),
    "communication_data_type": Key("B", None, _COMM + "; over ranks of orlop finetune: --grad-wire fp32|bf16", str),
    "seq_parallel_communication_data_type": Key("B", "fp32", _COMM),
    "gradient_allreduce_op": Key("B", "mean", _COMM),
    "prescale_gradients": Key("B", False, _COMM),
    "gradient_predivide_factor": Key("B", 1.0, _COMM),
    "sparse_gradients": Key("R", False, "Adam needs dense gradients; build embeddings with sparse=False"),
    # ZeRO
    "zero_optimization.stage": Key("A", 0, "0 to 3 on one rank: the same states, in host memory"),
    "zero_optimization.contiguous_gradients": Key("B", True, _ALWAYS),
    "zero_optimization.reduce_scatter": Key("B", True, _COMM),
    "zero_optimization.reduce_bucket_size": Key("B", 5e8, _COMM),
    "zero_optimization.allgather_partitions": Key("B", True, _COMM),
    "zero_optimization.allgather_bucket_size": Key("B", 5e8, _COMM),
    "zero_optimization.use_multi_rank_bucket_allreduce": Key("B", True, _COMM),
    "zero_optimization.overlap_comm": Key("A", None, "true: the update hides under the next forward", bool),
    "zero_optimization.load_from_fp32_weights": Key("A", True, "false: masters restart from the weights"),
    "zero_optimization.elastic_checkpoint": Key("R", False, "checkpoints do not depend on ranks anyway"),
    "zero_optimization.ignore_unused_parameters": Key("A", True, "false: a parameter without gradient is an error"),
    "zero_optimization.round_robin_gradients": Key("B", False, _COMM),
    "zero_optimization.legacy_stage1": Key("R", False, "the old stage 1 does not exist here"),
    "zero_optimization.sub_group_size": Key("B", 1e9, "updates run tensor by tensor"),
    "zero_optimization.override_module_apply": Key("B", True, "modules are not changed"),
    "zero_optimization.memory_efficient_linear": Key("B", True, "modules are not changed"),
    "zero_optimization.log_trace_cache_warnings": Key("B", False, "there is no trace cache"),
    "zero_optimization.enable_sanity_checks": Key("B", False, _ALWAYS),
    "zero_optimization.grad_hooks": Key("B", True, _ALWAYS),
    "zero_optimization.save_muon_momentum_buffer_in_memory": Key("B", False, "no Muon"),
    "zero_optimization.stage3_max_live_parameters": Key("B", 1e9, _STREAM),
    "zero_optimization.stage3_max_reuse_distance": Key("B", 1e9, _STREAM),
    "zero_optimization.stage3_prefetch_bucket_size": Key("B", 5e7, _STREAM),
    "zero_optimization.stage3_param_persistence_threshold": Key("B", 1e5, _STREAM),
    "zero_optimization.stage3_model_persistence_threshold": Key("B", None, _STREAM, (int, float)),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": Key("B", False, "weights are always whole"),
    "zero_optimization.stage3_module_granularity_threshold": Key("B", 0, _STREAM),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": Key("B", False, _COMM),
    "zero_optimization.stage3_allgather_sequential": Key("B", False, _COMM),
    "zero_optimization.leaf_module": Key("B", {}, "modules need no hints"),
    "zero_optimization.pipeline_loading_checkpoint": Key("B", False, "loading streams anyway"),
    "zero_optimization.zero_hpz_partition_size": Key("B", 1, _COMM),
    "zero_optimization.zero_quantized_weights": Key("B", False, _COMM),
    "zero_optimization.zero_quantized_gradients": Key("B", False, _COMM),
    "zero_optimization.zero_quantized_nontrainable_weights": Key("R", False, "weights are never quantized"),
    "zero_optimization.zeropp_loco_param": Key("R", None, "changes the numbers; not implemented", dict),
    "zero_optimization.mics_shard_size": Key("R", -1, "ranks are not grouped", least=-1),
    "zero_optimization.mics_hierarchical_params_gather": Key("R", False, "ranks are not grouped"),
    "zero_optimization.offload_param.device": Key("A", "none", "cpu: blocks come from host memory; nvme: from drives, through three slots of it"),
    "zero_optimization.offload_param.nvme_path": Key("A", None, "with device nvme: a directory, or one per drive", (str, list)),
    "zero_optimization.offload_param.buffer_count": Key("B", 5, _STREAM),
    "zero_optimization.offload_param.buffer_size": Key("B", 1e8, _STREAM),
    "zero_optimization.offload_param.max_in_cpu": Key("B", 1e9, _STREAM),
    "zero_optimization.offload_param.pin_memory": Key("B", True, "pinned where there is a GPU"),
    "zero_optimization.offload_optimizer.device": Key("A", "none", "cpu: host memory; nvme: drives; none: what fits on the GPU stays there"),
    "zero_optimization.offload_optimizer.nvme_path": Key("A", None, "with device nvme: a directory, or one per drive", (str, list)),
    "zero_optimization.offload_optimizer.buffer_count": Key("B", 4, "chunks pass through 80 MiB of host memory, whatever the model"),
    "zero_optimization.offload_optimizer.pin_memory": Key("B", True, "pinned where there is a GPU"),
    "zero_optimization.offload_optimizer.pipeline_read": Key("B", False, _DRIVES),
    "zero_optimization.offload_optimizer.pipeline_write": Key("B", False, _DRIVES),
    "zero_optimization.offload_optimizer.pipeline": Key("B", False, _DRIVES),
    "zero_optimization.offload_optimizer.fast_init": Key("B", False, "states are zeroed by all cores"),
    "zero_optimization.offload_optimizer.ratio": Key("R", 1.0, "the device that is named takes every state"),
    "zero_optimization.offload_optimizer.super_offload": Key("R", False, "no speculative step here"),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": Key("A", 0.8, "share of the cores that update"),
    "zero_optimization.zenflow": Key("R", None, "changes the numbers; not implemented", dict),
    # I/O, activations
    "aio.block_size": Key("A", 1 << 20, "bytes of one request to the drives of nvme_path"),
    "aio.queue_depth": Key("A", 8, "requests to them in flight, where it is given; else 32"),
    "aio.intra_op_parallelism": Key("B", 1, _IO),
    "aio.thread_count": Key("B", 1, _IO),
    "aio.single_submit": Key("B", False, _IO),
    "aio.overlap_events": Key("B", True, _IO),
    "aio.use_gds": Key("R", False, "no direct transfer from disk to device"),
    "activation_checkpointing.partition_activations": Key("R", False, "needs tensor parallelism"),
    "activation_checkpointing.cpu_checkpointing": Key("R", False, "use torch.autograd.graph.save_on_cpu"),
    "activation_checkpointing.contiguous_memory_optimization": Key("B", False, "torch's checkpointing is used"),
    "activation_checkpointing.number_checkpoints": Key("B", None, "torch's checkpointing is used", int),
    "activation_checkpointing.synchronize_checkpoint_boundary": Key("B", False, "torch's checkpointing is used"),
    "activation_checkpointing.profile": Key("B", False, "torch's checkpointing is used"),
    # monitors and tools
    "csv_monitor.enabled": Key("A", False, "OUTPUT/JOB/*.csv"),
    "csv_monitor.output_path": Key("A", "", "folder"),
    "csv_monitor.job_name": Key("A", "DeepSpeedJobName", "folder below it"),
    "tensorboard.enabled": Key("A", False, "event files; needs the tensorboard package"),
    "tensorboard.output_path": Key("A", "", "folder"),
    "tensorboard.job_name": Key("A", "DeepSpeedJobName", "folder below it"),
    "steps_per_print": Key("A", None, "a line every so many steps; Infinity: never", int, endless=True),
    "wall_clock_breakdown": Key("A", False, "times of forward, backward and step in that line"),
    "memory_breakdown": Key("A", False, "host bytes by purpose in that line"),
    "dump_state": Key("A", False, "prints the effective configuration"),
    "log_level": Key("A", None, "debug, info, warning, error", str),
    "timers": Key("B", {}, "see wall_clock_breakdown"),
    "checkpoint.tag_validation": Key("B", "Warn", _COMM),
    "checkpoint.load_universal": Key("B", False, "every checkpoint loads on any number of ranks"),
    "checkpoint.use_node_local_storage": Key("B", False, _COMM),
    "checkpoint.parallel_write": Key("B", {}, _COMM),
    "checkpoint.checkpoint_serialization": Key("B", True, "safetensors and JSON"),
    "checkpoint.writer": Key("B", {}, "files are written before save_checkpoint() returns"),
    "compat": Key("A", None, '"0.18": the defaults before 2026', str),
    "strict": Key("A", False, "unknown keys are errors"),
}  # fmt: skip

# Whole sections that change what is computed or need what is not here.
REFUSED_SECTIONS: dict[str, str] = {
    "wandb": "log from Python: engine.add_monitor()",
    "comet": "log from Python: engine.add_monitor()",
    "flops_profiler": "nothing is measured; use torch.profiler",
    "comms_logger": _COMM,
    "autotuning": _TUNE,
    "amp": "apex is not used; take bf16 or fp16",
    "compile": "offload is on anyway; call torch.compile on blocks yourself",
    "compression_training": "not implemented",
    "sparse_attention": "not implemented",
    "pipeline": "not implemented",
    "expert_parallel": "not implemented",
    "tensor_parallel": "not implemented",
    "hybrid_engine": "not implemented",
    "eigenvalue": "not implemented",
    "progressive_layer_drop": "not implemented",
    "curriculum_learning": "not implemented",
    "data_efficiency": "not implemented",
    "elasticity": "checkpoints load on any number of ranks",
    "quantize_training": "not implemented",
    "nebula": "checkpoints are files",
    "datastates_ckpt": "checkpoints are files",
}
# Those without an "enabled" of their own, and the key that switches them off: 0, 1, false, null, "none" or "auto".
SWITCHES: dict[str, str] = {
    "sparse_attention": "mode",
    "pipeline": "stages",
    "expert_parallel": "enabled",
    "tensor_parallel": "autotp_size",
    "quantize_training": "enabled",
    "datastates_ckpt": "enabled",
}

OPTIMIZERS = ("Adam", "AdamW")
REFUSED_OPTIMIZERS = (
    "Adagrad", "Lion", "Lamb", "OneBitAdam", "ZeroOneAdam", "OneBitLamb", "MuAdam", "MuAdamW", "MuSGD", "Muon",
)  # fmt: skip
_RATE = (float, list)
_WARMUP = {
    "warmup_num_steps": Key("A", 1000, "steps until the highest rate"),
    "warmup_type": Key("A", "log", "log or linear", choices=("log", "linear")),
}
_TOTAL = {"total_num_steps": Key("A", None, "where the schedule ends", int, least=1)}
SCHEDULERS: dict[str, dict[str, Key]] = {
    "WarmupLR": {
        "warmup_min_lr": Key("A", 0.0, "first rate, or one per group", _RATE, numbers=0),
        "warmup_max_lr": Key(
            "A", None, "highest rate, or one per group; else each group's lr", _RATE, numbers=0
        ),
        **_WARMUP,
    },
    "WarmupDecayLR": {
        "warmup_min_lr": Key("A", 0.0, "first and last rate, or one per group", _RATE, numbers=0),
        "warmup_max_lr": Key("A", 1e-3, "highest rate, or one per group", _RATE, numbers=0),
        **_WARMUP,
        **_TOTAL,
    },
    "WarmupCosineLR": {
        "warmup_min_ratio": Key("A", 0.0, "first share of each group's lr"),
        "cos_min_ratio": Key("A", 1e-4, "last share of each group's lr"),
        **_WARMUP,
        **_TOTAL,
    },
}
# What "auto" is of them where it is not the default. None: each group's lr, as the HF Trainer fills it in.
SCHEDULER_AUTO = {"warmup_max_lr": None}
REFUSED_SCHEDULERS = ("OneCycle", "LRRangeTest")

# Older names, and what each is now: at the top level, and in zero_optimization.
RENAMED = {"bfloat16": "bf16"}
RENAMED_IN_ZERO = {"stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save"}
# {"compat": "0.18"} brings back.
DEFAULTS_018 = {"gradient_clipping": 0.0, "bf16.check_grad_overflow": False}
