"""The kinds of isolation, and the command lines that enter them."""

import functools
import itertools
import json
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from moe_finetune.errors import DependencyError
from moe_finetune.evaluation.sandbox import seccomp

RUNNER = Path(__file__).resolve().parent
_START = "import sys; sys.path.insert(0, {folder!r}); import runner; runner.main()"
_IMAGE = "python:3.11-slim"
# One user ID per program, because process limits count a user's processes in all sandboxes.
# The start is random, so that two runs on one machine do not count together.
_USERS: Iterator[int] = itertools.count(1_000_000_000 + secrets.randbelow(1_000_000_000))


@dataclass(frozen=True)
class Limits:
    """Limits of one program.

    Attributes:
        seconds: wall clock for the program and its tests.
        processes: number of threads, and of processes if it may start any (docker, podman).
        file_bytes: maximum size of a file it writes, if it can write at all (without a sandbox).
        reply_bytes: longest answer to one call.
    """

    seconds: int = 10
    memory_bytes: int = 1 << 30
    processes: int = 8
    file_bytes: int = 1 << 20
    open_files: int = 64
    reply_bytes: int = 8 << 20

    def rlimits(self, uid: int | None, count_processes: bool) -> str:
        """Return the limits that the runner sets for itself, as JSON."""
        values = asdict(self) | {"cpu_seconds": self.seconds + 1, "uid": uid}
        if not count_processes:
            values["processes"] = 0
        return json.dumps(values)


def start(kind: str, role: str, limits: Limits) -> subprocess.Popen[bytes]:
    """Start ``role`` ("worker" or "checker") in isolation ``kind``, with pipes to talk to it."""
    filters: list[int] = []
    if kind == "bubblewrap":
        filters = [_filter(role)]
        arguments = _bubblewrap(role, limits, filters[0])
    elif kind in ("docker", "podman"):
        arguments = _container(kind, role, limits)
    else:
        # Without isolation, a limit on processes would count all of the user's.
        rlimits = limits.rlimits(None, count_processes=False)
        arguments = [*_python(sys.executable, str(RUNNER)), role, rlimits]
    try:
        return subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment(),
            cwd="/",
            start_new_session=True,
            pass_fds=filters,
        )
    finally:
        for fd in filters:
            os.close(fd)


def unusable(kind: str) -> str:
    """The reason why isolation ``kind`` cannot be tried here; "" if it can."""
    if kind != "bubblewrap":
        return ""
    if not sys.platform.startswith("linux"):
        return f"not on {sys.platform}"
    executable = shutil.which("bwrap")
    if executable is None:
        return "not installed"
    if not seccomp.supported():
        return f"no system call filter for {platform.machine()}"
    used = {argument for argument in _bubblewrap("worker", Limits(), 0) if argument[:2] == "--"}
    missing = sorted(used - _options(executable))
    return f"{executable} is too old (it has no {', '.join(missing)})" if missing else ""


def _filter(role: str) -> int:
    """Return a file descriptor of the system call filter of ``role``."""
    # One for each process, since reading moves its position. The checker forks for each job.
    fd = os.memfd_create("filter")
    os.write(fd, seccomp.program(forks=role == "checker"))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _python(executable: str, folder: str) -> list[str]:
    return [executable, "-I", "-S", "-B", "-c", _START.format(folder=folder)]


@functools.cache
def _options(executable: str) -> frozenset[str]:
    """The options that an installed bubblewrap knows."""
    done = subprocess.run([executable, "--help"], capture_output=True, text=True)
    return frozenset(re.findall(r"--[a-z0-9-]+", done.stdout + done.stderr))


@functools.cache
def _root_filesystem() -> list[str]:
    """Arguments that mount Python and the system's libraries read-only, and nothing else.

    Setuid programs among them gain nothing: bubblewrap forbids new privileges.
    """
    arguments: list[str] = []

    def mount(path: Path) -> None:
        # Created here with open modes: bubblewrap's are closed to the unprivileged user.
        for parent in reversed(path.parents[:-1]):
            if parent not in created:
                arguments.extend(["--perms", "0755", "--dir", str(parent)])
                created.add(parent)
        arguments.extend(["--ro-bind", str(path), str(path)])

    created: set[Path] = set()
    triplet = sysconfig.get_config_var("MULTIARCH") or ""
    libraries = Path("/usr/lib") / triplet
    for path in (libraries if libraries.is_dir() else Path("/usr/lib"), Path("/usr/lib64")):
        if path.is_dir():
            mount(path)
    for path in (Path("/lib"), Path("/lib64")):
        if path.is_symlink():
            arguments.extend(["--symlink", os.readlink(path), str(path)])
        elif path.is_dir():
            mount(path)
    prefix = Path(sys.base_prefix).resolve()
    if prefix == Path("/usr"):
        mount(_interpreter())
        mount(Path(sysconfig.get_path("stdlib")).resolve())
    else:
        mount(prefix)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(prefix)}))
    if packages.is_dir():  # third-party code, not the language
        arguments.extend(["--tmpfs", str(packages), "--remount-ro", str(packages)])
    arguments.extend(["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"])
    for name in ("/dev/null", "/dev/zero", "/dev/urandom"):
        arguments.extend(["--dev-bind", name, name])
    return [*arguments, "--dir", "/home", "--ro-bind", str(RUNNER), "/runner"]


def _interpreter() -> Path:
    """The file of this Python, outside any virtual environment."""
    prefix = Path(sys.base_prefix).resolve()
    return prefix / "bin" / f"python3.{sys.version_info.minor}"


def _bubblewrap(role: str, limits: Limits, filter: int) -> list[str]:
    executable = shutil.which("bwrap") or "bwrap"
    arguments = [executable, "--die-with-parent", "--new-session", "--unshare-ipc"]
    arguments += ["--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    arguments += ["--cap-drop", "ALL", "--seccomp", str(filter)]
    uid = None
    if os.getuid() == 0:
        uid = next(_USERS)
        arguments += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        arguments += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    arguments += _root_filesystem()
    arguments += ["--setenv", "HOME", "/home", "--remount-ro", "/", "--chdir", "/"]
    python = _python(str(_interpreter()), "/runner")
    return [*arguments, *python, role, limits.rlimits(uid, True)]


def _container(kind: str, role: str, limits: Limits) -> list[str]:
    memory = str(limits.memory_bytes)
    # fmt: off
    return [
        kind, "run", "--rm", "--interactive", "--pull", "never", "--network", "none",
        "--ipc", "none", "--read-only", "--cap-drop", "ALL",
        "--security-opt", "no-new-privileges", "--user", "65534:65534",
        "--memory", memory, "--memory-swap", memory, "--pids-limit", str(limits.processes),
        "--env", "HOME=/home", "--volume", f"{RUNNER}:/runner:ro",
        image(),
        *_python("python3", "/runner"), role, limits.rlimits(None, False),
    ]
    # fmt: on


def image() -> str:
    """The image that docker or podman runs programs in."""
    return os.environ.get("MOE_FINETUNE_SANDBOX_IMAGE", _IMAGE)


def environment() -> dict[str, str]:
    """Return the environment of the sandbox's launcher: only the user's PATH."""
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
