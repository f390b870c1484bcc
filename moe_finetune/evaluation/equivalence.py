r"""Whether two final answers are the same mathematics: ``2\sqrt{3}`` and ``\sqrt{12}``.

:mod:`moe_finetune.evaluation.extract` compares texts and numbers. Everything else goes to
math-verify in a child process: a model may write ``9^{9^{9}}``, on which computer algebra spends
hours in one call, or all memory. The library's own limits are alarms, which only the main thread
can set and which do not interrupt such a call. The kernel's limits on the process do, and count
only its processor time, so a verdict does not depend on how busy the machine is.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import re
import selectors
import subprocess
import sys
import threading
from pathlib import Path

from moe_finetune.errors import DependencyError
from moe_finetune.evaluation.extract import math_equal, normalize_math

CPU_SECONDS = 5
# For a machine that gives the process no processor time.
WALL_SECONDS = 120
LONGEST = 1000
_WORKER = Path(__file__).with_name("equivalence_worker.py")
# Computer algebra reads a word as a product of letters, where the order does not matter.
_WORDS = re.compile(r"[^\W\d_]{3,}(?:[\s,.'-]*[^\W\d_]+)*")
_BASE = re.compile(r"_\{?(\d+)\}?$")


def require() -> None:
    """Raise DependencyError unless math-verify is installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise DependencyError(
            "answers of mathematics are compared by math-verify, which is not installed: "
            "pip install 'moe-finetune[eval]'"
        )


def same_answer(answer: str | None, reference: str) -> bool:
    """Whether ``answer`` is ``reference``: as text, as a number, or by computer algebra.

    Args:
        answer: LaTeX or text, as :func:`moe_finetune.evaluation.extract.math_answer` finds it.

    Raises:
        DependencyError: math-verify is not installed.
    """
    if answer is None or math_equal(answer, reference):
        return answer is not None
    target = normalize_math(reference)
    if not target or not answer.strip() or len(answer) > LONGEST or _WORDS.fullmatch(target):
        return False
    bases = [_BASE.search(normalize_math(text)) for text in (answer, reference)]
    if bases[0] and (not bases[1] or bases[0][1] != bases[1][1]):
        return False  # math-verify drops the base of a number
    return _comparer.same(answer, reference)


class _Comparer:
    """The comparing process, started on first use and again after it ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def same(self, answer: str, reference: str) -> bool:
        """Ask the process; an answer that exceeds its limits counts as wrong."""
        with self._lock:
            if self._process is None:
                self._start()
            verdict = self._ask([answer, reference])
            if verdict is None:
                self._stop()
                print(
                    f"comparing {answer!r:.80} with {reference!r:.80} took too much time or "
                    "memory; it counts as wrong",
                    file=sys.stderr,
                )
            return bool(verdict)

    def _start(self) -> None:
        require()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER), str(CPU_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        if self._ask(["1", "1"]) is not True:
            self._stop()
            raise DependencyError(
                "math-verify cannot be used; see what "
                f"'{sys.executable} -c \"import math_verify\"' says"
            )

    def _ask(self, pair: list[str]) -> bool | None:
        assert self._process is not None
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps(pair).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            return None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if not selector.select(WALL_SECONDS):
                return None
        return {b"true\n": True, b"false\n": False}.get(stdout.readline())

    def _stop(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()
        self._process = None


_comparer = _Comparer()
atexit.register(_comparer._stop)
