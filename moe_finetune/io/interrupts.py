"""Keep Ctrl-C effective during imports, whose code may swallow it."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

LOOK_AGAIN = 0.2
"""Seconds between checks of whether an interrupt is still being raised."""


@contextmanager
def interrupts_outlast_imports() -> Iterator[None]:
    """Repeat a KeyboardInterrupt that was raised inside an import until it leaves this context.

    Some packages catch it, or continue with a half-imported module; the errors that follow become
    the KeyboardInterrupt again. Cleanup code that handles it is not disturbed.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    alarm = signal.getsignal(signal.SIGALRM)
    repeating = False

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal repeating
        repeating = repeating or _importing(frame)
        if repeating:
            signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, LOOK_AGAIN)
        if signum == signal.SIGINT or not _on_its_way():
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception as error:
        if repeating:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if repeating:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, alarm)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _on_its_way() -> bool:
    """Return whether a KeyboardInterrupt is being handled."""
    error = sys.exception()
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None
