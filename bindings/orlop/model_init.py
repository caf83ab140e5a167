"""orlop.init: models are built in host memory, where orlop.wrap takes them over, in the dtype they will have."""

from __future__ import annotations

import contextlib

from . import errors
from .torch_support import DTYPES, require_torch

torch = require_torch("orlop.init")

_register_hook = torch.nn.modules.module.register_module_parameter_registration_hook
_open: list[object] = []  # those that are entered now, the innermost, which alone counts, last


@contextlib.contextmanager
def init(dtype=None):
    """Builds or loads a model of any size in host memory, each weight once, for orlop.wrap to take over.

        with orlop.init(dtype=torch.bfloat16):
            model = AutoModelForCausalLM.from_config(config)  # or from_pretrained(folder)
        model, optimizer = orlop.wrap(model, {"lr": 2e-5}, device="cuda")

    dtype: float32, bfloat16 or float16, of all parameters that a module does not ask for in a dtype of its own, also
        where a library inside sets another default; None: torch's default dtype. The weights are those of the plain
        construction on the CPU under torch.set_default_dtype(dtype), drawn by the same random numbers.
    """
    with building(dtype, "cpu"):
        yield


@contextlib.contextmanager
def building(dtype, device):
    """Parameters become `dtype` and come to `device` as modules take them; None leaves either as it is."""
    if dtype is not None and dtype not in DTYPES:
        raise errors.UsageError(f"orlop.init: dtype = {dtype!r} is not one of {', '.join(map(str, DTYPES))}")
    before, this = torch.get_default_dtype(), object()

    def registered(_module, _name, parameter):
        if _open[-1] is this:
            _take_in(parameter, dtype, device)

    handle = _register_hook(registered)
    _open.append(this)
    try:
        if dtype is not None:
            torch.set_default_dtype(dtype)
        with contextlib.nullcontext() if device is None else torch.device(device):
            yield
    finally:
        _open.pop()
        handle.remove()
        torch.set_default_dtype(before)


def _take_in(parameter, dtype, device) -> None:
    """The parameter itself stays the same object, so that ties stay, and whoever draws its values later draws them
    in its dtype and where it is."""
    if parameter is None or isinstance(parameter, torch.nn.parameter.UninitializedTensorMixin):
        return
    # A dtype other than the default one is what the module asked for.
    by_default = parameter.dtype in DTYPES and parameter.dtype == torch.get_default_dtype()
    if dtype is not None and by_default and parameter.dtype != dtype:
        parameter.data = parameter.data.to(dtype)
    if device is not None and not parameter.is_meta and parameter.device.type != device:
        parameter.data = parameter.data.to(device)
