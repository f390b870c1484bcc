r"""Compare two final answers mathematically: ``2\sqrt{3}`` equals ``\sqrt{12}``.

:mod:`moe_finetune.evaluation.final_answers` compares texts and numbers. Everything else goes to
math-verify in a child process: a model may write ``9^{9^{9}}``, on which computer algebra spends
hours in one call, or all memory. The library's own limits are alarms, which only the main thread
can set and which do not interrupt such a call. The kernel's limits on the process do, and count
only its processor time, so a verdict does not depend on how busy the machine is.
"""

import atexit
import importlib.util
import json
import os
import re
import resource
import subprocess
import sys
import threading
import time

from moe_finetune.errors import DependencyError
from moe_finetune.evaluation.final_answers import math_equal, names_differ, normalize_math

CPU_SECONDS = 5
MEMORY_BYTES = 2 << 30
LONGEST = 1000
# Computer algebra reads a word as a product of letters, where the order does not matter.
_WORDS = re.compile(r"[^\W\d_]{3,}(?:[\s,.'-]*[^\W\d_]+)*")
_DIGITS = re.compile(r"\A[\d.,]+\Z")
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
        answer: LaTeX or text, as :func:`~moe_finetune.evaluation.final_answers.math_answer` finds
            it.
    """
    if answer is None or math_equal(answer, reference):
        return answer is not None
    target = normalize_math(reference)
    if not target or not answer.strip() or len(answer) > LONGEST or _WORDS.fullmatch(target):
        return False
    if names_differ(answer, reference):
        return False  # math-verify compares what is assigned, whatever to
    lists = [
        "," in text for text in map(normalize_math, (answer, reference)) if _DIGITS.search(text)
    ]
    if lists in ([True, False], [False, True]):
        return False  # to math-verify, "3, 400" is 3400
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
    """The process that compares, a line of JSON each way; started on first use."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def same(self, answer: str, reference: str) -> bool:
        """Ask the process; an answer that exceeds its limits counts as wrong."""
        with self._lock:
            if self._process is None and self._ask("1", "1") is None:
                self._stop()
                raise DependencyError(
                    "math-verify cannot be used: its process ended; "
                    f"'{sys.executable} -c \"import math_verify\"' shows why"
                )
            verdict = self._ask(answer, reference)
            if verdict is None:
                self._stop()
                print(
                    f"comparing {answer!r:.80} with {reference!r:.80} took too much time or "
                    "memory; it counts as wrong",
                    file=sys.stderr,
                )
            return bool(verdict)

    def _ask(self, answer: str, reference: str) -> bool | None:
        if self._process is None:
            require()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"import {__name__} as child; child.serve()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # Ctrl-C reaches it through the end of its input
            )
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None and pipe_out is not None
        try:
            pipe_in.write(json.dumps([answer, reference, CPU_SECONDS]) + "\n")
            pipe_in.flush()
            return json.loads(pipe_out.readline())
        except (BrokenPipeError, ValueError):
            return None

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def serve() -> None:
    """Compare what comes in on standard input, line by line."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # computer algebra may print
    for line in sys.stdin:
        print(json.dumps(compare(*json.loads(line))), file=channel, flush=True)


_comparer = _Comparer()
atexit.register(_comparer._stop)
