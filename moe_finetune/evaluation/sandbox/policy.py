"""Which isolation there is on this machine, and the command line that enters it."""

from __future__ import annotations

import functools
import itertools
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from moe_finetune.errors import DependencyError

RUNNER = Path(__file__).resolve().parent
_START = "import sys; sys.path.insert(0, {folder!r}); import runner; runner.main()"
_IMAGE = "python:3.11-slim"
# One user number per program: a limit on processes counts a user's, over all sandboxes.
# The start is random, so that two runs on one machine do not count together.
_USERS: Iterator[int] = itertools.count(1_000_000_000 + secrets.randbelow(1_000_000_000))


@dataclass(frozen=True)
class Limits:
    """What one program may use.

    Attributes:
        seconds: wall clock for the program and its tests.
        memory_bytes: address space of each process.
        processes: processes and threads.
        file_bytes: size of any file it writes (only its empty home is writable).
        home_bytes: size of that home.
        open_files: open file descriptors.
        reply_bytes: longest answer to one call.
    """

    seconds: int = 10
    memory_bytes: int = 1 << 30
    processes: int = 8
    file_bytes: int = 1 << 20
    home_bytes: int = 16 << 20
    open_files: int = 64
    reply_bytes: int = 8 << 20

    def rlimits(self, uid: int | None, count_processes: bool) -> str:
        """Return what the runner sets for itself, as JSON."""
        values = asdict(self) | {"cpu_seconds": self.seconds + 1, "uid": uid}
        if not count_processes:
            values["processes"] = 0
        return json.dumps(values)


def command(kind: str, role: str, limits: Limits) -> list[str]:
    """Return the command that starts ``role`` ("worker" or "checker") in isolation ``kind``."""
    if kind == "bubblewrap":
        return _bubblewrap(role, limits)
    if kind in ("docker", "podman"):
        return _container(kind, role, limits)
    # The user's own processes would count against a limit here.
    rlimits = limits.rlimits(None, count_processes=False)
    return [*_python(sys.executable, str(RUNNER)), role, rlimits]


def _python(executable: str, folder: str) -> list[str]:
    return [executable, "-I", "-S", "-B", "-c", _START.format(folder=folder)]


@functools.cache
def _has_size_option(executable: str) -> bool:
    text = subprocess.run([executable, "--help"], capture_output=True, text=True).stdout
    return "--size" in text


@functools.cache
def _root_filesystem() -> list[str]:
    """Arguments that mount the system's programs and libraries read-only, and nothing else."""
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/lib", "/lib64", "/lib32"):
        path = Path(name)
        if path.is_symlink():
            arguments += ["--symlink", os.readlink(path), name]
        elif path.is_dir():
            arguments += ["--ro-bind", name, name]
    prefix = Path(sys.base_prefix).resolve()
    if not prefix.is_relative_to("/usr"):
        # Made here with open modes: bubblewrap's own are closed to the user without rights.
        for parent in reversed(prefix.parents[:-1]):
            arguments += ["--perms", "0755", "--dir", str(parent)]
        arguments += ["--ro-bind", str(prefix), str(prefix)]
    for name in ("/etc/ld.so.cache",):
        arguments += ["--ro-bind-try", name, name]
    for name in ("/dev/null", "/dev/zero", "/dev/urandom"):
        arguments += ["--dev-bind", name, name]
    return [*arguments, "--ro-bind", str(RUNNER), "/runner"]


def _bubblewrap(role: str, limits: Limits) -> list[str]:
    executable = shutil.which("bwrap") or "bwrap"
    arguments = [executable, "--die-with-parent", "--new-session", "--unshare-ipc"]
    arguments += ["--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    arguments += ["--cap-drop", "ALL"]
    uid = None
    if os.getuid() == 0:
        uid = next(_USERS)
        arguments += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        arguments += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    arguments += _root_filesystem()
    if _has_size_option(executable):
        arguments += ["--perms", "0777", "--size", str(limits.home_bytes), "--tmpfs", "/home"]
        arguments += ["--setenv", "HOME", "/home"]
    arguments += ["--remount-ro", "/", "--chdir", "/"]
    python = str(Path(sys.base_prefix).resolve() / "bin" / f"python3.{sys.version_info.minor}")
    return [*arguments, *_python(python, "/runner"), role, limits.rlimits(uid, True)]


def _container(kind: str, role: str, limits: Limits) -> list[str]:
    memory = str(limits.memory_bytes)
    # fmt: off
    return [
        kind, "run", "--rm", "--interactive", "--pull", "never", "--network", "none",
        "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
        "--user", "65534:65534", "--memory", memory, "--memory-swap", memory,
        "--pids-limit", str(limits.processes), "--tmpfs", f"/home:size={limits.home_bytes}",
        "--env", "HOME=/home", "--volume", f"{RUNNER}:/runner:ro",
        image(),
        *_python("python3", "/runner"), role, limits.rlimits(None, False),
    ]
    # fmt: on


def image() -> str:
    """The image that docker or podman runs programs in."""
    return os.environ.get("MOE_FINETUNE_SANDBOX_IMAGE", _IMAGE)


def environment() -> dict[str, str]:
    """Return the environment of the sandbox's launcher: nothing of the user's but the path."""
    return {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"}


REFUSAL = (
    "generated programs run only in a sandbox, and none works here: {reasons}. Install bubblewrap "
    "(apt-get install bubblewrap) or docker with the image {image}, score the samples on such a "
    "machine ('moe-finetune eval' writes them in any case), or accept the risk with "
    "--allow-unsafe-local"
)


def refuse(reasons: list[str]) -> DependencyError:
    """Return the error for a machine without a sandbox."""
    return DependencyError(REFUSAL.format(reasons="; ".join(reasons), image=image()))
