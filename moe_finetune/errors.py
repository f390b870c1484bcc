"""Errors that users can encounter, each also a subclass of a standard-library type.

The command line prints the message of any :class:`MoeFinetuneError` and ends with exit code 2, or 1
after a :class:`VerificationError` or if the machine is the cause (:func:`is_machine_failure`). A
message names the place, the problem and the remedy.
"""

import difflib
import errno
from collections.abc import Iterable, Iterator


class MoeFinetuneError(Exception):
    """Base class of all errors that a user can fix."""


class RecipeError(MoeFinetuneError, ValueError):
    """A recipe key, value or combination that cannot run."""


class DataError(MoeFinetuneError, ValueError):
    """A dataset or file of records that cannot be read; the message names file and line."""


class CheckpointError(MoeFinetuneError, ValueError):
    """A checkpoint folder that is missing, incomplete or damaged."""


class NoSmallModelError(CheckpointError):
    """No small model of a checkpoint's type can be built to compare anything on."""


class UnsupportedModelError(MoeFinetuneError, NotImplementedError):
    """A model type, layout or option that no family supports."""


class AdapterError(MoeFinetuneError, ValueError):
    """An adapter that is damaged or does not fit its base."""


class CaptureError(MoeFinetuneError, RuntimeError):
    """The model's MoE blocks cannot be recorded."""


class ForeignKernelError(CaptureError):
    """Another package's kernel runs the MoE layers and would skip the losses."""


class QuantizationError(MoeFinetuneError, RuntimeError):
    """An operation that quantized weights do not support."""


class ObjectiveError(MoeFinetuneError, ValueError):
    """A loss term that cannot be built or reaches nothing trainable."""


class OutputExistsError(MoeFinetuneError, FileExistsError):
    """An output folder that already contains other files."""


class OutputError(MoeFinetuneError, OSError):
    """An output that cannot be written."""


class OutputBusyError(MoeFinetuneError, BlockingIOError):
    """An output that another process is writing."""


class DiskSpaceError(OutputError):
    """A disk without enough free space."""


class EvaluationError(MoeFinetuneError, RuntimeError):
    """An evaluation that cannot start or finish."""


class TraceError(MoeFinetuneError, ValueError):
    """A routing trace that is damaged or belongs to another model."""


class StudyError(MoeFinetuneError, ValueError):
    """A study that cannot be expanded, or whose folder lacks listed files."""


class MachineError(MoeFinetuneError, RuntimeError):
    """A process that ended because memory or disk ran out, or because it was killed."""


class PluginError(MoeFinetuneError, ImportError):
    """A plugin file, or an installed package's family, loss or reward, that cannot be used."""


class NumericsError(MoeFinetuneError, ArithmeticError):
    """A loss, gradient or weight that is not a finite number."""


class VerificationError(NumericsError, CheckpointError):
    """A merged checkpoint that is not its base + adapter."""


class DependencyError(MoeFinetuneError, ImportError):
    """An optional dependency that is missing or unusable here."""


_MACHINE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM),
    *(errno.EMFILE, errno.ENFILE, errno.EFBIG),
)
# From Rust libraries and torch, whose errors are neither OSError nor MemoryError.
_MACHINE_WORDS = ("(os error 28)", "(os error 27)", "(os error 5)", "DefaultCPUAllocator")


def is_machine_failure(error: BaseException) -> bool:
    """Whether the error is, or was caused by, a full or failing disk or lack of memory."""
    return any(
        isinstance(cause, MemoryError | DiskSpaceError | MachineError)
        or (isinstance(cause, OSError) and cause.errno in _MACHINE)
        or type(cause).__name__ == "OutOfMemoryError"
        or any(words in str(cause) for words in _MACHINE_WORDS)
        for cause in _causes(error)
    )


def disk_is_full(error: BaseException) -> bool:
    """Whether the error is, or was caused by, a disk or a quota without space."""
    return any(
        (isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT))
        or "(os error 28)" in str(cause)
        for cause in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest option, or a list of all options."""
    names = sorted(options)
    if not names:
        return "; there is none"
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(names)}"


def reason_of(error: BaseException) -> str:
    """The first line of an error's message, or its type if the message is empty.

    A line that ends with a colon continues with the next one, as in config errors of transformers.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    colons = next((i for i, line in enumerate(lines) if not line.endswith(":")), len(lines) - 1)
    return " ".join(lines[: colons + 1]) or type(error).__name__
