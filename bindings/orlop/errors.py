"""The exceptions of the package, one class per error code of the native library."""

from __future__ import annotations


class Error(RuntimeError):
    """Base of every error that Orlop raises.

    code: the kind, as in orlop::ErrorCode. exit_code: what the command ends with.
    """

    code = "internal"
    exit_code = 1


class UsageError(Error):
    """An argument or a configuration that cannot work."""

    code = "usage"
    exit_code = 2


class DoesNotFitError(Error):
    """A budget is too small; the message names shortage and remedy per tier."""

    code = "does_not_fit"
    exit_code = 3


class InvalidDataError(Error):
    """A model, checkpoint or data file that cannot be used."""

    code = "invalid_data"
    exit_code = 4


class IoError(Error):
    """A system call on a file failed."""

    code = "io"


class OutOfMemoryError(Error):
    """An allocation was refused at run time."""

    code = "out_of_memory"


class DeviceError(Error):
    """The accelerator or its driver reported an error."""

    code = "device"


class CommunicatorError(Error):
    """A collective failed or ranks disagree."""

    code = "communicator"


class NonFiniteError(Error):
    """Too many steps in a row with NaN or Inf."""

    code = "non_finite"


# By the code, for the native library.
BY_CODE: dict[str, type[Error]] = {
    cls.code: cls
    for cls in (
        Error,
        UsageError,
        DoesNotFitError,
        InvalidDataError,
        IoError,
        OutOfMemoryError,
        DeviceError,
        CommunicatorError,
        NonFiniteError,
    )
}
