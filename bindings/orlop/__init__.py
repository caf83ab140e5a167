"""Orlop trains models that are larger than the accelerator's memory.

    import orlop

    engine = orlop.Engine.open("model_dir", orlop.EngineConfig())
    loader = orlop.DataLoader("train.tok", engine.config.batch, seed=0, shuffle=True)
    print(engine.step([loader.next()]).loss)

Importing the package prints nothing and loads neither torch nor CUDA.
"""

from . import errors
from ._orlop import (
    IGNORED_LABEL,
    AsyncFile,
    BatchConfig,
    DataLoader,
    DataPosition,
    DType,
    Engine,
    EngineConfig,
    EvalResult,
    LimitsConfig,
    MicroBatch,
    NvmeConfig,
    OptimizerConfig,
    PlacementConfig,
    PlanLane,
    PlanLine,
    PlanReport,
    Precision,
    Ranks,
    SaveMode,
    ScheduleConfig,
    ScheduleKind,
    StateKind,
    Stats,
    StepResult,
    TensorDescription,
    Tier,
    TokenFileSummary,
    TokenWriter,
    __version__,
    describe_token_file,
    plan,
)
from .errors import (
    CommunicatorError,
    DeviceError,
    DoesNotFitError,
    Error,
    InvalidDataError,
    IoError,
    NonFiniteError,
    OutOfMemoryError,
    UsageError,
)

__all__ = [
    "IGNORED_LABEL",
    "AsyncFile",
    "BatchConfig",
    "CommunicatorError",
    "DType",
    "DataLoader",
    "DataPosition",
    "DeviceError",
    "DoesNotFitError",
    "Engine",
    "EngineConfig",
    "Error",
    "EvalResult",
    "InvalidDataError",
    "IoError",
    "LimitsConfig",
    "MicroBatch",
    "NonFiniteError",
    "NvmeConfig",
    "OptimizerConfig",
    "OutOfMemoryError",
    "PlacementConfig",
    "PlanLane",
    "PlanLine",
    "PlanReport",
    "Precision",
    "Ranks",
    "SaveMode",
    "ScheduleConfig",
    "ScheduleKind",
    "StateKind",
    "Stats",
    "StepResult",
    "TensorDescription",
    "Tier",
    "TokenFileSummary",
    "TokenWriter",
    "UsageError",
    "__version__",
    "describe_token_file",
    "errors",
    "plan",
]

# The doors for PyTorch, each imported with torch when it is first asked for; None: the module itself.
_DOORS = {
    "Adam": ("adamw", "Adam"),
    "AdamW": ("adamw", "AdamW"),
    "GradScaler": ("grad_scaler", "GradScaler"),
    "deepspeed_compat": ("deepspeed_compat", None),
    "gathered": ("wrapping", "gathered"),
    "hf": ("hf", None),
    "init": ("model_init", "init"),
    "unwrap": ("wrapping", "unwrap"),
    "wrap": ("wrapping", "wrap"),
}


def __getattr__(name):
    if name not in _DOORS:
        raise AttributeError(f"module 'orlop' has no attribute {name!r}")
    import importlib

    module, attribute = _DOORS[name]
    value = importlib.import_module(f".{module}", __name__)
    if attribute is not None:
        value = getattr(value, attribute)
    globals()[name] = value
    return value


def __dir__():
    return sorted([*globals(), *_DOORS])
