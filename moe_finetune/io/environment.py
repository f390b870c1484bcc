"""What a run ran on: versions, processor, accelerator, commit of nothing local."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from typing import Any

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


def describe_environment() -> dict[str, Any]:
    """Versions and hardware as plain values; no user, host or path names."""
    import torch

    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "packages": versions,
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
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
