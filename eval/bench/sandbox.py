"""Cost of the sandbox: HumanEval's 164 reference solutions, sandboxed and in plain Python.

    python eval/bench/sandbox.py [--data ../shared/data] [--rounds 3]

Each round runs every program three ways, one after another in rotating order: in the sandbox, as
`python file.py`, and as `python -I -S -B file.py` (the sandbox's flags, without isolation). Prints
JSON. The goal: a mean cost of at most 40 ms per program over `python file.py`.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from saved import add_save, finish

from moe_finetune.evaluation.code import human_eval_program
from moe_finetune.evaluation.sandbox import Sandbox
from moe_finetune.io.rows import read_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    shared_data = Path(__file__).resolve().parents[3] / "shared" / "data"
    parser.add_argument(
        "--data", default=os.environ.get("MOE_FINETUNE_DATA", shared_data), type=Path
    )
    parser.add_argument("--rounds", default=3, type=int)
    add_save(parser, "sandbox")
    options = parser.parse_args()
    problems = read_rows(options.data / "HumanEval.jsonl.gz")
    programs = [human_eval_program(p, p["canonical_solution"]) for p in problems]
    passed = 0
    with Sandbox() as sandbox, tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.py" for number in range(len(programs))]
        for file, program in zip(files, programs, strict=True):
            file.write_text(f"{program.code}\n{program.tests}", encoding="utf-8")

        def isolated(number: int) -> None:
            nonlocal passed
            passed += sandbox.run(programs[number]).passed

        ways: dict[str, Callable[[int], None]] = {
            "sandbox": isolated,
            "python": lambda n: _python(files[n]),
            "python -I -S -B": lambda n: _python("-I", "-S", "-B", files[n]),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for round in range(options.rounds):
            for number in range(len(programs)):
                first = (round + number) % len(ways)
                for name in [*ways, *ways][first : first + len(ways)]:
                    started = time.perf_counter()
                    ways[name](number)
                    seconds[name].append(time.perf_counter() - started)
        kind = sandbox.kind
    mean = {name: 1000 * statistics.mean(values) for name, values in seconds.items()}
    median = {name: 1000 * statistics.median(values) for name, values in seconds.items()}
    result = {
        "sandbox": kind,
        "programs": len(programs),
        "rounds": options.rounds,
        "passed": passed,
        "mean_ms": {name: round_ms(value) for name, value in mean.items()},
        "median_ms": {name: round_ms(value) for name, value in median.items()},
        "cost_over_python_ms": round_ms(mean["sandbox"] - mean["python"]),
        "cost_over_python_without_site_ms": round_ms(mean["sandbox"] - mean["python -I -S -B"]),
    }
    finish(options, result)


def round_ms(value: float) -> float:
    return round(value, 1)


def _python(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, *arguments], check=True, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
