"""``make gpu-check``: the tests marked ``gpu``, a step and the memory plan, in one file to send in.

The file is readable and has JSON in its last block. A part that fails does not stop the others.

    python eval/bench/gpu_check.py --output gpu-check.md
    python eval/bench/gpu_check.py --device cpu --tiny    # what a CPU can run of it
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moe_finetune.io.environment import describe_environment

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WIDTHS = ("qwen3_30b_a3b", "deepseek_moe_16b", "deepseek_v2_lite", "moonlight_16b_a3b")


def gpu_tests(arguments) -> dict[str, Any]:
    """Each test's outcome and seconds; without a GPU the tests are counted."""
    files = [file for file in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in file.read_text()]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rA", "-p", "no:cacheprovider"]
    command += ["--tb=short", "--durations=0", *map(str, sorted(files))]
    if arguments.device == "cpu":
        command.append("--collect-only")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    output = done.stdout.strip().splitlines()
    if done.returncode:
        raise RuntimeError("\n".join([*output[-60:], done.stderr[-2000:]]))
    kinds = ("PASSED", "SKIPPED", "XFAIL")
    return {"tests": [line for line in output if line.startswith(kinds)], "result": output[-1]}


def step(arguments) -> dict[str, Any]:
    """``step.py`` at the widths of four checkpoints."""
    rows = {}
    for geometry in ("tiny",) if arguments.tiny else WIDTHS:
        options = ["--geometry", geometry, "--device", arguments.device, "--dtype", "bfloat16"]
        if arguments.tiny:
            options += ["--rounds", "1", "--warmup", "0", "--tokens", "64", "--length", "32"]
            options += ["--no-memory"]
        else:
            options += ["--layers", "4", "--tokens", "8192", "--length", "2048", "--rounds", "6"]
        found = script("step.py", options)
        rows[geometry] = {"rows": found["rows"], "ratios": found["ratios"]}
    return rows


def memory(arguments) -> dict[str, Any]:
    """The memory plan against the allocator's peak; within 10 %."""
    options = ["--device", arguments.device, "--dtype", "bfloat16"]
    if arguments.tiny:
        options += ["--settings", "qwen3, attention"]
    rows = script("memory.py", options)["rows"]
    worst = max(abs(row["predicted / measured"] - 1) for row in rows.values())
    assert arguments.tiny or worst < 0.1, f"the plan is off by {worst:.0%}: {rows}"
    return rows


PARTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "tests marked gpu": gpu_tests,
    "step": step,
    "memory plan": memory,
}


def script(name: str, options: list[str]) -> dict[str, Any]:
    """Run another benchmark in a separate process; return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "figures.json"
        command = [sys.executable, "-W", "ignore", str(HERE / name), *options]
        command += ["--write", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name} {' '.join(options)} failed:\n{done.stderr[-3000:]}")
        return json.loads(target.read_text(encoding="utf-8"))


def run(arguments) -> dict[str, dict[str, Any]]:
    """Run every part: ok or failed, with seconds and figures or the reason."""
    outcomes: dict[str, dict[str, Any]] = {}
    for name in arguments.only or PARTS:
        print(f"{name} ...", flush=True)
        started, row = time.perf_counter(), {}
        try:
            row = {"outcome": "ok", "figures": PARTS[name](arguments)}
        except Exception as error:  # one part's failure is a result
            reason = "".join(traceback.format_exception(error))
            row = {"outcome": "failed", "reason": reason[-6000:]}
        outcomes[name] = {**row, "seconds": round(time.perf_counter() - started, 1)}
        print(f"  {row['outcome']} in {outcomes[name]['seconds']} s", flush=True)
    return outcomes


def page(result: dict[str, Any]) -> str:
    """The text of the file to send in."""
    lines = ["# GPU check", "", f"device: {result['device']}", ""]
    lines += ["| check | outcome | seconds |", "| --- | --- | ---: |"]
    for name, row in result["checks"].items():
        lines.append(f"| {name} | {row['outcome']} | {row['seconds']} |")
    for name, row in result["checks"].items():
        if "reason" in row:
            lines += ["", f"## {name}: {row['outcome']}", "```", row["reason"].rstrip(), "```"]
    body = json.dumps(result, indent=2, default=str)
    return "\n".join([*lines, "", "## JSON", "```json", body, "```", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU and a minute")
    parser.add_argument("--only", nargs="*", choices=PARTS, metavar="PART")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "gpu-check.md")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here; --device cpu --tiny runs what a CPU can")
    name = "CPU"
    if arguments.device == "cuda":
        name = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    result = {"device": name, "environment": describe_environment(), "checks": run(arguments)}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(page(result), encoding="utf-8")
    print(f"result: {arguments.output}")
    return int(any(row["outcome"] == "failed" for row in result["checks"].values()))


if __name__ == "__main__":
    sys.exit(main())
