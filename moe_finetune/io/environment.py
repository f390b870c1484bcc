"""The environment of a run: versions, processor, accelerator."""

import datetime
import importlib.metadata
import json
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

from moe_finetune.io.atomic import write_atomic
from moe_finetune.io.versions import untested
from moe_finetune.plugins import loaded_files

PACKAGES = (
    "moe-finetune",
    "torch",
    "transformers",
    "peft",
    "trl",
    "accelerate",
    "datasets",
    "safetensors",
    "numpy",
    "vllm",
    "lm-eval",
)


def package_versions(*names: str) -> dict[str, str | None]:
    """Installed version of each package; None if it is not installed."""
    versions: dict[str, str | None] = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def describe_environment() -> dict[str, Any]:
    """Versions and hardware as plain values; no user, host or path names."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "packages": package_versions(*PACKAGES),
        "newer_than_tested": untested(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerators": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if cuda
        else [],
        "cuda": torch.version.cuda if cuda else None,
        "plugins": loaded_files(),
    }


def write_environment(path: Path) -> None:
    """Write a run's software versions and hardware to its ``environment.json``.

    Those of the start stay; a resume adds its own to ``resumed`` if they differ from the last.
    """
    now = describe_environment()
    noted: Any = {}
    if path.is_file():
        with suppress(ValueError):
            noted = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(noted, dict) and "packages" in noted:
        later = noted.get("resumed", [])
        last = {name: value for name, value in [noted, *later][-1].items() if name != "resumed"}
        if {**last, "date": now["date"]} != now:
            later = [*later, now]
        now = {**noted, "resumed": later} if later else noted
    write_atomic(path, json.dumps(now, indent=2) + "\n")


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
