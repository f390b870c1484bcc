"""Run as a program: reads pairs of answers as JSON lines, writes ``true`` or ``false`` for each.

Imports nothing of this package. The kernel ends it when a pair takes more than the processor
seconds of its argument; more than ``MEMORY_BYTES`` is a MemoryError.
"""

from __future__ import annotations

import json
import resource
import sys
import time

MEMORY_BYTES = 2 << 30


def main() -> None:
    """Answer until the input ends."""
    seconds = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import math_verify

    # LaTeX only: the library's other reader hands text to Python's eval.
    latex = [math_verify.LatexExtractionConfig()]

    def same(answer: str, reference: str) -> bool:
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

    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    for line in sys.stdin:
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + seconds + 1, hard))
        try:
            verdict = same(*json.loads(line))
        except (Exception, RecursionError):
            verdict = False
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main()
