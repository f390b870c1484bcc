r"""Compare two final answers mathematically: ``2\sqrt{3}`` equals ``\sqrt{12}``.

:mod:`moe_finetune.evaluation.extract` compares texts and numbers. Everything else goes to
math-verify in a child process: a model may write ``9^{9^{9}}``, on which computer algebra spends
hours in one call, or all memory. The library's own limits are alarms, which only the main thread
can set and which do not interrupt such a call. The kernel's limits on the process do, and count
only its processor time, so a verdict does not depend on how busy the machine is.
"""

import atexit
import importlib.util
import os
import re
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path

from moe_finetune.errors import DependencyError
from moe_finetune.evaluation.extract import math_equal, normalize_math
from moe_finetune.io.worker import Worker, WorkerError

CPU_SECONDS = 5
MEMORY_BYTES = 2 << 30
LONGEST = 1000
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
    """Return whether ``answer`` equals ``reference`` as text, as a number, or by computer algebra.

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


def compare(answer: str, reference: str, seconds: int) -> bool:
    """Compare two answers by computer algebra, within limits on this process.

    The kernel kills the process after ``seconds`` more of processor time; using more than
    ``MEMORY_BYTES`` raises MemoryError.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + seconds + 1, hard))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import math_verify

    # LaTeX only: the library's other reader hands text to Python's eval.
    latex = [math_verify.LatexExtractionConfig()]
    try:
        target, gold = (
            math_verify.parse(
                f"${text.replace(chr(92) + '$', '').replace('$', '')}$",
                extraction_config=latex,
                fallback_mode="no_fallback",
                parsing_timeout=None,
            )
            for text in (answer, reference)
        )
        return bool(target and gold) and math_verify.verify(gold, target, timeout_seconds=None)
    except (Exception, RecursionError):  # computer algebra may raise anything on a strange answer
        return False


class _Comparer:
    """The process that compares, started on first use and restarted after it ended."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._lock = threading.Lock()

    def same(self, answer: str, reference: str) -> bool:
        """Ask the process; an answer that exceeds its limits counts as wrong."""
        with self._lock:
            worker = self._worker or self._start()
            try:
                return worker.call(compare, answer, reference, CPU_SECONDS)
            except WorkerError:
                self._stop()
                print(
                    f"comparing {answer!r:.80} with {reference!r:.80} took too much time or "
                    "memory; it counts as wrong",
                    file=sys.stderr,
                )
                return False

    def _start(self) -> Worker:
        require()
        descriptor, name = tempfile.mkstemp(prefix="moe-finetune-", suffix=".log")
        os.close(descriptor)
        self._log = Path(name)
        self._worker = Worker(self._log)
        try:
            self._worker.call(compare, "1", "1", CPU_SECONDS)
        except WorkerError as error:
            self._stop()
            raise DependencyError(f"math-verify cannot be used: {error}") from None
        return self._worker

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.__exit__()
            self._worker = None
            self._log.unlink(missing_ok=True)


_comparer = _Comparer()
atexit.register(_comparer._stop)
