"""The order of a trainer's callbacks, which matters in each event."""

from typing import Any

from transformers import TrainerCallback

FIRST = (
    "SpecializationCallback",  # puts the method's values into the log entry that all others read
    "RunLog",  # writes the entry
    "LiveTable",  # shows what was written
)
"""Before the trainer's own callbacks and reporters."""
LAST = (
    "KeepSteps",  # keeps the model that the step's other callbacks left
    "StopOnSignal",  # may end the run, so it comes last
)


def add_callbacks(trainer: Any, *callbacks: TrainerCallback) -> None:
    """Add ``callbacks`` to ``trainer`` in the order above; other callbacks keep their order."""
    listed = trainer.callback_handler.callbacks
    listed += [callback for callback in callbacks if callback not in listed]
    listed.sort(key=_position)


def _position(callback: TrainerCallback) -> int:
    for kind in type(callback).__mro__:
        if kind.__name__ in FIRST:
            return FIRST.index(kind.__name__) - len(FIRST)
        if kind.__name__ in LAST:
            return 1 + LAST.index(kind.__name__)
    return 0
