"""Door 2: any nn.Module with the weights of its blocks in host memory or on drives, brought to the device block by
block."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Mapping

from . import errors
from .torch_support import check_disjoint, check_parameter, require_torch

torch = require_torch("orlop.wrap")

from .adamw import AdamW  # noqa: E402
from .config import parse_bytes  # noqa: E402
from .device_link import DeviceLink  # noqa: E402
from .drive_options import param_share, split_config, state_drives  # noqa: E402
from .drive_weights import DriveWeights, spread  # noqa: E402
from .forward_gate import find_blocks  # noqa: E402
from .host_memory import FreedMemory, MappedFiles, owned  # noqa: E402
from .older_torch import compile_through_modules  # noqa: E402
from .streamed_block import Block, Entry, is_managed  # noqa: E402
from .streamed_weights import StreamedWeights  # noqa: E402

_log = logging.getLogger("orlop")
_streams: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def wrap(model, optimizer=None, config="auto", blocks=None, device=None, **options):
    """(model, optimizer): the same module, whose blocks are fetched for their forward and backward.

    optimizer: a torch AdamW or Adam over the model's parameters (groups, hyperparameters and state are taken
        over), a mapping of arguments of orlop.AdamW, or None for evaluation only.
    config: "auto", or a mapping, YAML or JSON with limits.gpu: bytes for weights on the device ("24GiB"); as many
        blocks as fit beside two for streaming stay there, and sums of micro-batches as far as they fit beside the
        highest use of memory so far. "auto" takes what is free on a GPU less a reserve. nvme.paths: directories of
        drives for optimizer states, as nvme= of orlop.AdamW; nvme.param_share: the share of the weights of blocks, 0 to
        1, that is there, too, so that a model may be larger than host memory (0 by default): transformers maps the file
        of a model that it loads in the file's dtype, and from there each weight goes to its drive. They come through
        three slots of host memory, each of the largest block. With nvme=None beside it states stay in host memory, and
        so do the weights that train. state_dict() reads all weights at once, `parameter.detach()` one: adapters alone
        are saved by save_pretrained(folder, state_dict={n: p.detach() for n, p in
        model.named_parameters() if p.requires_grad}).
    blocks: the modules that come and go; by default the members of the outermost ModuleLists.
    device: where the model runs; by default where it is. A model on the CPU (orlop.init) that is larger than the
        GPU is wrapped with device="cuda": its blocks never are there all at once. Its memory is taken over.
    options: further arguments of orlop.AdamW, among them states=: of resident blocks, and of weights outside of
        blocks, optimizer states live on the device too where there is room; those of others in host memory.

    Weights outside of blocks, and those that two blocks share, stay on the device. Frozen ones have no states and may
    have any dtype. Blocks may be compiled one by one: block.compile().
    """
    if model in _streams:
        raise errors.UsageError("orlop.wrap: this model is wrapped already; orlop.unwrap(model) first")
    config, nvme = split_config(config)
    share, nvme = param_share(nvme)
    if nvme is not None:
        options = {"nvme": nvme, **options}
    limit = _limit_bytes(config)
    names = {p: name for name, p in model.named_parameters()}
    for p, name in names.items():
        check_parameter(p, name)
        if is_managed(p):
            raise errors.UsageError(
                f"orlop.wrap: {name} is in a block of another wrapped model; wrap the whole model once, or "
                "orlop.unwrap() that one first"
            )
    check_disjoint([(name, p) for p, name in names.items()])  # copies of their own would untie them
    first = next(iter(names)).device if names else torch.device("cpu")
    device = first if device is None else torch.empty(0, device=device).device
    modules = find_blocks(model) if blocks is None else list(dict.fromkeys(blocks))
    _check_not_compiled(model, set(modules))
    compile_through_modules()
    made: list[Block] = []
    manager = drives = None
    try:
        parts = _parts_of_blocks(model, modules, names)
        trains = optimizer is not None and options.get("nvme") is None  # in host memory, with their states
        drives = _take_drives(parts, share, nvme, trains)
        _make_blocks(made, parts, device, drives)
        _move_rest(model, {entry.parameter for block in made for entry in block.entries}, device)
        link = _device_link(device, limit)
        _keep_resident(made, limit, device)
        manager = StreamedWeights(model, made, link, drives)
        wrapped = _make_optimizer(model, optimizer, manager, options)
        _own_homes(manager)
        manager.handles += [_guard_loading(block.module, manager) for block in made]
    except BaseException:
        _give_back(model, made, manager, first)
        if drives is not None:
            drives.close()
        raise
    _streams[model] = manager
    return model, wrapped


def unwrap(model):
    """Brings all weights back to the device for good; an optimizer is to be closed before, which would go on to
    train what is no longer the model's."""
    manager = _streams.get(model)
    if manager is None:
        raise errors.UsageError("orlop.unwrap: this model is not wrapped")
    if any(entry.slot is not None for entry in manager.entry_of.values()):
        raise errors.UsageError("orlop.unwrap: the optimizer of this model is open; optimizer.close() first")
    manager.restore()
    del _streams[model]
    return model


def stream_of(model):
    """What moves the blocks of a wrapped model: counts of fetches, blocks on the device now and at most."""
    return _streams[model]


def _check_not_compiled(model, blocks) -> None:
    """A compiler may see a block, not the hooks around it that move its weights."""
    for name, module in model.named_modules():
        renamed = "_orig_mod" in module._modules
        around = getattr(module, "_compiled_call_impl", None) is not None and any(
            m in blocks for m in module.modules() if m is not module
        )
        if renamed or around:
            raise errors.UsageError(
                f"orlop.wrap: {name or 'the model'} is compiled in a way that "
                f"{'changes the names of weights' if renamed else 'spans blocks'}; "
                "give the plain model and compile each block in its place: block.compile()"
            )


def _move_rest(model, streamed, device) -> None:
    with torch.no_grad():
        for module in model.modules():
            for p in module._parameters.values():
                if p is not None and p not in streamed and p.device != device:
                    p.data = p.data.to(device)
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device:
                    module._buffers[name] = buffer.to(device)


def _give_back(model, blocks, manager, device) -> None:
    """After a refusal the model is the plain one that was given, with its weights where they were."""
    for handle in manager.handles if manager is not None else ():
        handle.remove()
    entries = [entry for block in blocks for entry in block.entries]
    for entry in entries:
        entry.parameter.__class__ = entry.kind
        vars(entry.parameter).pop("_orlop_entry", None)
        if entry.has_home:
            entry.parameter.data = entry.host_view().to(device, copy=True)
    _move_rest(model, {entry.parameter for entry in entries}, device)


def _own_homes(manager) -> None:
    """What the optimizer has not copied is the model's own memory from now on, and what it has, gone."""
    files = MappedFiles()
    for entry in manager.entry_of.values():
        if entry.slot is None and not entry.is_on_drives:
            entry.host = owned(entry.host, files)
    FreedMemory().give_back()


def _guard_loading(module, manager):
    """Refuses load_state_dict(assign=True), which would leave tensors that nobody moves or trains in the place of the
    weights; adapters, which are the user's own, may be assigned. (The public name came after torch 2.4.)"""

    manager, block = weakref.ref(manager), weakref.ref(module)

    def before_load(*arguments):
        state, prefix, metadata = arguments[-7:-4]
        if not metadata.get("assign_to_params_buffers"):
            return
        for name, p in block().named_parameters():
            if prefix + name in state and manager().owns(p):
                raise errors.UsageError(
                    f"{prefix}{name}: load_state_dict(assign=True) would put another tensor in the place of weights "
                    "that orlop.wrap manages; assign=False copies into them"
                )

    register = getattr(module, "register_load_state_dict_pre_hook", module._register_load_state_dict_pre_hook)
    return register(before_load)


def _device_link(device, limit):
    return DeviceLink(device, limit) if device.type == "cuda" else None


def _limit_bytes(config) -> int | None:
    if config == "auto":
        return None
    if not isinstance(config, Mapping):
        raise errors.UsageError(f"orlop.wrap: config = {config!r} is neither 'auto', a mapping nor a file")
    if "zero_optimization" in config:
        raise errors.UsageError("orlop.wrap: this is a DeepSpeed configuration; use orlop.deepspeed_compat")
    sections = set(config) & {"limits"}
    limits = config["limits"] if sections else config
    if not isinstance(limits, Mapping):
        raise errors.UsageError(f"orlop.wrap: limits = {limits!r} is no mapping with the key gpu")
    unknown = (set(config) - sections if sections else set()) | (set(limits) - {"gpu"})
    if unknown:
        raise errors.UsageError(
            f"orlop.wrap: config key {min(unknown)!r} is not known; limits.gpu and nvme are"
        )
    value = limits.get("gpu")
    try:
        return None if value is None else parse_bytes(value)
    except ValueError as error:
        raise errors.UsageError(f"orlop.wrap: limits.gpu: {error}") from None


def _parts_of_blocks(model, modules, names) -> list[tuple[torch.nn.Module, list]]:
    """Each module with the parameters that come and go with it, and their names."""
    inside = set(model.modules())
    uses: dict[torch.Tensor, int] = {}
    for module in modules:
        if module not in inside:
            raise errors.UsageError(
                f"orlop.wrap: a {type(module).__name__} of blocks= is no part of the model"
            )
        for p in set(module.parameters()):
            uses[p] = uses.get(p, 0) + 1
    in_blocks = {m for module in modules for m in module.modules()}
    for module in inside - in_blocks:  # tied to something outside
        for p in module._parameters.values():
            if p is not None and p in uses:
                uses[p] += 1
    nested = [m for module in modules for m in module.modules() if m is not module and m in set(modules)]
    if nested:
        raise errors.UsageError(
            f"orlop.wrap: a {type(nested[0]).__name__} of blocks= lies inside another of them"
        )
    return [
        (module, [(p, names[p]) for p in module.parameters() if uses[p] == 1 and p.numel() > 0])
        for module in modules
    ]


def _take_drives(parts, share, nvme, trained_stay) -> DriveWeights | None:
    """Room on drives for the weights of some blocks, evenly among all; with `trained_stay` of frozen ones alone."""
    if share == 0:
        return None
    wanted = spread([sum(p.nbytes for p, _ in named) for _, named in parts], share)
    blocks = []
    for index in wanted:
        named = [(p, name) for p, name in parts[index][1] if not (trained_stay and p.requires_grad)]
        if not named:
            raise errors.UsageError(
                f"nvme: param_share is {share:g}, but all weights of {parts[index][1][0][1]} and those beside it train "
                "with optimizer states in host memory; give the states drives too (nvme= of orlop.AdamW, DeepSpeed's "
                "offload_optimizer.device), or leave param_share out"
            )
        blocks.append(named)
    drives = DriveWeights(state_drives(nvme))
    try:
        drives.reserve(blocks)
    except BaseException:
        drives.close()
        raise
    _log.info(
        "%.2f GiB of weights in %d of %d blocks are on drives", drives.bytes / 2**30, len(blocks), len(parts)
    )
    return drives


def _make_blocks(made, parts, device, drives) -> None:
    """Block after block: what is to lie on drives leaves host memory before the next one is touched."""
    freed = FreedMemory()
    for index, (module, named) in enumerate(parts):
        made.append(Block(index, module, [Entry(p, name) for p, name in named], device))
        for entry in made[-1].entries:
            if drives is not None and drives.has_room_for(entry.parameter):
                entry.move_to(drives)
                freed.add(entry.bytes)


def _make_optimizer(model, optimizer, manager, options):
    options = {"module": model, **options, "gradients": "leave", "stream": manager}
    if optimizer is None:
        return None
    if isinstance(optimizer, Mapping):
        return AdamW(model.parameters(), **{**dict(optimizer), **options})
    if isinstance(optimizer, AdamW):
        raise errors.UsageError("orlop.wrap: give the arguments of orlop.AdamW or a torch optimizer")
    return AdamW.from_torch(optimizer, **options)


def _keep_resident(blocks, limit, device) -> None:
    """Blocks from the end of the model, whose backward comes first, stay as long as the limit lasts."""
    if limit is None:
        limit = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 0
        bounded = False
    else:
        bounded = True
    window = 2 * max((block.bytes for block in blocks), default=0)
    total = sum(block.bytes for block in blocks)
    if bounded and total > limit and window > limit:
        raise errors.DoesNotFitError(
            f"orlop.wrap: limits.gpu is {limit} bytes, two blocks at a time need {window} and all of them {total}; "
            "raise the limit or give smaller blocks="
        )
    room = total if total <= limit else max(0, limit - window)
    for block in reversed(blocks):
        if block.bytes > room:
            break
        room -= block.bytes
        block.resident = True


@contextlib.contextmanager
def gathered(what, write=False):
    """The weights of a module or of parameters on the device, to read or, with write, to change.

    In a graph that is built inside, they count as ordinary weights until the next step of the optimizer. A tensor that
    is kept of them, as `detach()` or `state_dict()` give, has what the weights were at the end of the section.
    """
    parameters = list(what.parameters()) if isinstance(what, torch.nn.Module) else list(what)
    managers = [m for m in _streams.values() if any(m.owns(p) for p in parameters)]
    may_be_in_graph = torch.is_grad_enabled() and not write
    with contextlib.ExitStack() as sections:  # each ends, whatever becomes of the others
        for manager in managers:
            sections.callback(manager.scatter, manager.gather(parameters), write, may_be_in_graph)
        yield
