"""SIGTERM ends a command as Ctrl-C does: with its cleanup and exit code 130."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGTERM; a second SIGTERM ends the process at once.

    Code that is being imported may swallow it; the errors that follow become it again. Forked
    workers end by the signal itself. Does nothing where SIGTERM has a handler.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    process, received = os.getpid(), False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal received
        if os.getpid() != process:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        if received:
            os._exit(130)
        received = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except Exception as error:
        if received:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
