"""DeepSpeedEngine: forward, backward and step around a model and orlop.AdamW."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path

import torch

from .. import errors
from ..adamw import live_optimizers
from ..deepspeed_config import explain
from . import checkpoint
from .loss_scaler import LossScaler
from .monitor import make_monitors
from .optimizers import make_optimizer, stream_weights
from .schedules import make_scheduler

_log = logging.getLogger("orlop")
_ZERO = "zero_optimization"


def make_engine(model, config, optimizer=None, parameters=None, scheduler=None) -> DeepSpeedEngine:
    """An engine as initialize() returns it."""
    if config["log_level"]:
        _log.setLevel(config["log_level"].upper())
    for finding in config.findings:
        if finding.grade == "?":
            _log.warning("%s: %s = %r: %s", config.source, finding.path, finding.value, finding.text)
        elif finding.grade == "B":
            _log.info("%s: %s = %r: %s", config.source, finding.path, finding.value, finding.text)
    if config["dump_state"]:
        print("\n".join(explain(config)), flush=True)
    dtype = torch.float16 if config["fp16.enabled"] else torch.bfloat16 if config["bf16.enabled"] else None
    if dtype is not None:
        model.to(dtype)
    streams = config[f"{_ZERO}.offload_param.device"] != "none"
    optimizer = (stream_weights if streams else make_optimizer)(config, model, optimizer, parameters)
    if callable(scheduler) and not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        scheduler = scheduler(optimizer)
    elif scheduler is None and config["scheduler.type"] and optimizer is not None:
        scheduler = make_scheduler(config, optimizer)
    return DeepSpeedEngine(model, config, optimizer, scheduler)


class DeepSpeedEngine(torch.nn.Module):
    """Made by initialize(). Attributes: module, optimizer, lr_scheduler, global_steps, global_samples,
    micro_steps, skipped_steps."""

    def __init__(self, module, config, optimizer, lr_scheduler):
        super().__init__()
        self.module, self.optimizer, self.lr_scheduler = module, optimizer, lr_scheduler
        self.config = config
        self.collate_fn = None
        self.loss_scaler = LossScaler(config)
        self.monitors = make_monitors(config)
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self.local_rank, self.global_rank, self.world_size = 0, 0, 1
        self._boundary: bool | None = None
        self._applied = False
        self._norm = None
        self._loss = None
        self._seconds = dict.fromkeys(("forward", "backward", "step"), 0.0)
        self._accumulation = config["gradient_accumulation_steps"] or 1
        if optimizer is not None:
            optimizer.overflow = False

    # --- the loop -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _timed(self, name):
        begin = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - begin

    def forward(self, *inputs, **kwargs):
        with self._timed("forward"), self._autocast():
            if self.config["fp16.auto_cast"]:
                inputs = [_to_half(value) for value in inputs]
                kwargs = {key: _to_half(value) for key, value in kwargs.items()}
            return self.module(*inputs, **kwargs)

    def _autocast(self):
        if not self.config["torch_autocast.enabled"]:
            return contextlib.nullcontext()
        dtype = getattr(torch, self.config["torch_autocast.dtype"])
        return torch.autocast(self.device.type, dtype=dtype)

    def backward(self, loss, retain_graph=False, scale_wrt_gas=True):
        """Divides by the accumulation, multiplies by the loss scale, runs backward. Returns the loss."""
        divided = loss
        if scale_wrt_gas and self._manages_accumulation():
            divided = loss / self._accumulation
        self._loss = loss.detach()
        with self._timed("backward"):
            (divided * self.loss_scaler.scale).backward(retain_graph=retain_graph)
        return divided

    def scale(self, loss):
        """The loss that a caller's own backward() is to start from, as that of the engine does."""
        return loss * (self.loss_scaler.scale / (self._accumulation if self._manages_accumulation() else 1))

    def step(self, lr_kwargs=None):
        """Ends a micro-batch; at the boundary of the accumulation clips, updates and clears gradients."""
        self._applied = False
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        self.global_samples += self.train_micro_batch_size_per_gpu() or 1
        if not boundary:
            return
        with self._timed("step"):
            self._update(lr_kwargs or {})
        self.global_steps += 1
        self._report()

    def _update(self, lr_kwargs):
        optimizer = self._required_optimizer()
        if not self.config[f"{_ZERO}.ignore_unused_parameters"]:
            for name, p in self.module.named_parameters():
                if p.requires_grad and p.grad is None:
                    raise errors.UsageError(f"{name} got no gradient, and ignore_unused_parameters is false")
        if self.loss_scaler.scale != 1.0:
            optimizer.scale_gradients_(1.0 / self.loss_scaler.scale)
        clip = self.config["gradient_clipping"]
        self._norm = None
        if clip > 0:
            norm = float(optimizer.clip_grad_norm_(clip))
        optimizer.step()
        self._norm = norm if clip > 0 else optimizer.grad_norm
        overflow = optimizer.step_was_skipped
        optimizer.overflow = overflow
        optimizer.zero_grad()
        self.skipped_steps += overflow
        self._applied = not overflow
        self.loss_scaler.update(overflow, optimizer.first_bad)
        if self.lr_scheduler is not None and not overflow:
            self.lr_scheduler.step(**lr_kwargs)

    def _report(self):
        events = [("Train/Samples/lr", self.get_lr()[0], self.global_samples)]
        if self._loss is not None:
            events.insert(0, ("Train/Samples/train_loss", float(self._loss), self.global_samples))
        if self.loss_scaler.dynamic:
            events.append(("Train/Samples/loss_scale", self.loss_scaler.scale, self.global_samples))
        for monitor in self.monitors:
            monitor.write_events(events)
        every = self.config["steps_per_print"]
        if not every or self.global_steps % every:
            return
        line = f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}"
        if self.config["wall_clock_breakdown"]:
            line += "".join(f", {name}={1e3 * seconds:.1f} ms" for name, seconds in self._seconds.items())
            self._seconds = dict.fromkeys(self._seconds, 0.0)
        if self.config["memory_breakdown"]:
            line += f", bytes={self.optimizer.memory_report()}"
        print(line, flush=True)

    def add_monitor(self, monitor):
        """`monitor.write_events([(tag, value, samples), ...])` is called after every step."""
        self.monitors.append(monitor)

    def zero_grad(self, set_to_none=True):
        self._required_optimizer().zero_grad(set_to_none)

    @contextlib.contextmanager
    def no_sync(self):
        """One rank: there is nothing to leave out."""
        yield

    # --- accumulation and numbers ---------------------------------------------------------------

    def _manages_accumulation(self):
        return self.config["managed_gradient_accumulation"]

    def is_gradient_accumulation_boundary(self):
        """Whether the next step() updates."""
        if self._boundary is not None:
            return self._boundary
        return not self._manages_accumulation() or (self.micro_steps + 1) % self._accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary):
        """Whether step() updates, from now on and whatever the count of micro-batches says."""
        self._boundary = bool(is_boundary)

    def gradient_accumulation_steps(self):
        return self._accumulation

    def train_batch_size(self):
        return (self.train_micro_batch_size_per_gpu() or 1) * self._accumulation

    def set_train_batch_size(self, train_batch_size):
        """Changes the accumulation; the micro batch stays."""
        micro = self.train_micro_batch_size_per_gpu() or 1
        if train_batch_size < micro or train_batch_size % micro:
            raise errors.UsageError(
                f"train_batch_size {train_batch_size} is no multiple of the micro batch {micro}"
            )
        self._accumulation = train_batch_size // micro

    def train_micro_batch_size_per_gpu(self):
        return self.config["train_micro_batch_size_per_gpu"]

    def gradient_clipping(self):
        return self.config["gradient_clipping"]

    def zero_optimization_stage(self):
        return self.config[f"{_ZERO}.stage"]

    def get_global_grad_norm(self):
        """Of the last step, before clipping, of the unscaled gradients; None before the first."""
        return self._norm

    def get_lr(self):
        return [group["lr"] for group in self._required_optimizer().param_groups]

    def was_step_applied(self):
        """Whether the last step() has changed weights: False inside an accumulation and after an overflow."""
        return self._applied

    @property
    def device(self):
        return next(self.module.parameters()).device

    def _required_optimizer(self):
        if self.optimizer is None:
            raise errors.UsageError(
                "this engine has no optimizer: the configuration names none and none was given"
            )
        return self.optimizer

    def deepspeed_io(self, dataset, batch_size=None, route="train", pin_memory=True, data_sampler=None,
                     collate_fn=None, num_local_io_workers=None):  # fmt: skip
        """A loader of micro-batches, or of `batch_size` rows.

        route "train": in a new order each pass, drawn from torch's generator, unless a sampler is given or the dataset
        is iterable; "eval" and "predict": in order. pin_memory: where there is a GPU. collate_fn: else that of
        initialize(). num_local_io_workers: processes that read; None: none but this one.
        """
        if route not in ("train", "eval", "predict"):
            raise errors.UsageError(f"deepspeed_io: route {route!r} is not one of train, eval, predict")
        size = self.train_micro_batch_size_per_gpu() if batch_size is None else batch_size
        if size is None:
            raise errors.UsageError(
                "a data loader needs train_micro_batch_size_per_gpu or train_batch_size in the configuration, or "
                "deepspeed_io(..., batch_size=ROWS)"
            )
        iterable = isinstance(dataset, torch.utils.data.IterableDataset)
        return torch.utils.data.DataLoader(
            dataset,
            batch_size=size,
            shuffle=route == "train" and data_sampler is None and not iterable,
            sampler=data_sampler,
            num_workers=num_local_io_workers or 0,
            collate_fn=self.collate_fn if collate_fn is None else collate_fn,
            pin_memory=pin_memory and torch.cuda.is_available(),
            drop_last=self.config["dataloader_drop_last"],
        )

    # --- checkpoints ----------------------------------------------------------------------------

    def save_checkpoint(self, save_dir, tag=None, client_state=None, save_latest=True,
                        exclude_frozen_parameters=False):  # fmt: skip
        """Writes SAVE_DIR/TAG; client_state: numbers, text, lists, tuples and dicts of them. Returns True.

        Inside an accumulation window the gradients so far are part of it.
        """
        optimizer = self._required_optimizer()
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        state = {
            "client_state": client_state or {},
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "micro_steps": self.micro_steps,
            "skipped_steps": self.skipped_steps,
            "loss_scaler": self.loss_scaler.state_dict(),
            "lr_scheduler": self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None,
        }
        names = {p: name for name, p in self.module.named_parameters()}
        tensors, state["optimizer"] = _pack(optimizer, names)
        others = {"optimizer": tensors}
        gradients = {n: p.grad.detach().clone().contiguous() for p, n in names.items() if p.grad is not None}
        if gradients:
            others["gradients"] = gradients
        model = self.module_state_dict(exclude_frozen_parameters)
        checkpoint.write(Path(save_dir), tag, model, others, state, save_latest)
        return True

    def load_checkpoint(self, load_dir, tag=None, load_module_strict=True, load_optimizer_states=True,
                        load_lr_scheduler_states=True, load_module_only=False, custom_load_fn=None):  # fmt: skip
        """(path, client_state), or (None, {}) when no checkpoint is there and no tag was given.

        Gradients that are here are dropped; those of a window in which the checkpoint was written go on.
        """
        checkpoint.recover(folder := Path(load_dir))
        if tag is None and (tag := checkpoint.latest_tag(folder)) is None:
            _log.warning("%s holds no checkpoint: nothing was loaded", folder)
            return None, {}
        path = folder / str(tag)
        state = checkpoint.read_state(path)
        scheduler = self.lr_scheduler if load_lr_scheduler_states and not load_module_only else None
        checkpoint.check_scheduler(scheduler, state, path)
        weights = checkpoint.read_tensors(path, state, "model")
        if custom_load_fn is not None:
            custom_load_fn(src=weights, dst=self.module)
        else:
            self.load_module_state_dict(weights, strict=load_module_strict)
        if load_module_only:
            return str(path), state["client_state"]
        if load_optimizer_states:
            params = dict(self.module.named_parameters())
            tensors = checkpoint.read_tensors(path, state, "optimizer")
            keep_masters = self.config[f"{_ZERO}.load_from_fp32_weights"]
            _unpack(self._required_optimizer(), params, tensors, state["optimizer"], keep_masters, path)
        if scheduler is not None:
            scheduler.load_state_dict(state["lr_scheduler"])
        for name in ("global_steps", "global_samples", "micro_steps", "skipped_steps"):
            setattr(self, name, state[name])
        self.loss_scaler.load_state_dict(state["loss_scaler"])
        factor = self.loss_scaler.scale / state["loss_scaler"]["scale"]
        self._load_gradients(checkpoint.read_tensors(path, state, "gradients"), factor)
        return str(path), state["client_state"]

    def _load_gradients(self, gradients, factor):
        """factor: this loss scale over the one that they have."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        for name, p in self.module.named_parameters():
            if p.requires_grad and name in gradients:
                saved = gradients[name]
                if factor != 1.0:
                    saved = saved.float() * factor
                saved = saved.to(device=p.device, dtype=p.dtype)
                p.grad = torch.empty_strided(p.size(), p.stride(), dtype=p.dtype, device=p.device).copy_(
                    saved
                )

    def module_state_dict(self, exclude_frozen_parameters=False):
        frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}
        state = self.module.state_dict()
        return {k: v for k, v in state.items() if not (exclude_frozen_parameters and k in frozen)}

    def load_module_state_dict(self, state_dict, strict=True):
        if self.optimizer is not None:
            self.optimizer.synchronize()
        self.module.load_state_dict(state_dict, strict=strict)

    def save_16bit_model(self, save_dir, save_filename="pytorch_model.bin", exclude_frozen_parameters=False):
        """The weights as they are trained, in one file; .safetensors or torch's format by the name."""
        path = Path(save_dir) / save_filename
        path.parent.mkdir(parents=True, exist_ok=True)
        state = self.module_state_dict(exclude_frozen_parameters)
        if path.suffix == ".safetensors":
            import safetensors.torch

            kept, _ = checkpoint.split_shared(state)
            safetensors.torch.save_file(kept, path, metadata={"format": "pt"})
        else:
            torch.save({name: value.cpu() for name, value in state.items()}, path)
        return True

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters=False):
        return {
            name: value.cpu() for name, value in self.module_state_dict(exclude_frozen_parameters).items()
        }

    def zero_gather_16bit_weights_on_model_save(self):
        return True

    # --- life -----------------------------------------------------------------------------------

    def offload_states(self, *_, **__):
        """States are in host memory already."""

    def reload_states(self, *_, **__):
        """States stay in host memory."""

    def empty_partition_cache(self):
        """There is none."""

    def compile(self, *args, **kwargs):
        self.module.compile(*args, **kwargs)

    def destroy(self):
        """Ends updates and gives the host memory back."""
        if self.optimizer in live_optimizers():
            self.optimizer.close()


def _to_half(value):
    return value.half() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _pack(optimizer, names):
    """(tensors by NAME.key, what JSON holds) of an optimizer's state; raises UsageError for a parameter without a
    name."""
    for i, group in enumerate(optimizer.param_groups):
        for j, p in enumerate(group["params"]):
            if p not in names:
                raise errors.UsageError(
                    f"save_checkpoint: parameter {j} of group {i} of the optimizer, of shape {tuple(p.shape)}, is not "
                    "in the model, and a checkpoint goes by names; make it a parameter of the module"
                )
    tensors, steps = {}, {}
    optimizer.synchronize()
    for p, state in optimizer.state.items():
        for key, value in state.items():
            if key == "step":
                steps[names[p]] = int(value)
            elif isinstance(value, torch.Tensor):
                tensors[f"{names[p]}.{key}"] = value
    groups = []
    for group in optimizer.param_groups:
        plain = {k: float(v) if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
        groups.append({**plain, "params": [names[p] for p in group["params"]]})
    return tensors, {"steps": steps, "param_groups": groups}


def _unpack(optimizer, params, tensors, saved, keep_masters, path):
    """Loads what _pack() gave, by name; raises InvalidDataError listing names that differ."""
    here = {p: name for name, p in params.items()}
    present = [
        [here.get(p, "(not in the model)") for p in group["params"]] for group in optimizer.param_groups
    ]
    stored = [group["params"] for group in saved["param_groups"]]
    if present != stored:
        missing = sorted({n for g in present for n in g} - {n for g in stored for n in g})
        extra = sorted({n for g in stored for n in g} - {n for g in present for n in g})
        raise errors.InvalidDataError(
            f"{path}: the optimizer of the checkpoint has other parameters: missing there {missing}, only there {extra}"
            + ("" if missing or extra else "; groups or their order differ")
        )
    index = {name: i for i, name in enumerate(name for group in stored for name in group)}
    updated = set(saved["steps"])
    strange = {key.rpartition(".")[0] for key in tensors} - updated or updated - set(index)
    if strange:
        raise errors.InvalidDataError(
            f"{path}: the optimizer has states of {min(strange)!r}, which is not among its parameters that were updated"
        )
    states = {index[name]: {"step": float(step)} for name, step in saved["steps"].items()}
    for key, tensor in tensors.items():
        name, kind = key.rsplit(".", 1)
        if keep_masters or kind not in ("master", "master_lo"):
            states[index[name]][kind] = tensor
    groups = [{**group, "params": [index[n] for n in group["params"]]} for group in saved["param_groups"]]
    for group in groups:
        group["betas"] = tuple(group["betas"])
    optimizer.load_state_dict({"state": states, "param_groups": groups})
