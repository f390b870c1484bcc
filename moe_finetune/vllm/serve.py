"""``serve``: run ``vllm serve`` on a merged checkpoint until it is interrupted."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from moe_finetune.errors import CheckpointError, RecipeError
from moe_finetune.io.checkpoint_files import COPY_AGAIN
from moe_finetune.io.json_file import read_object
from moe_finetune.io.run_folder import checkpoint_in, checkpoint_name
from moe_finetune.vllm.adapters import adapter_arguments, checked_adapters
from moe_finetune.vllm.install import CPU_KV_CACHE, is_cpu_build, require_vllm
from moe_finetune.vllm.lora_support import ask_vllm
from moe_finetune.vllm.supervisor import supervised

TAIL_LINES = 30
STOP_SECONDS = 30.0


@dataclass(frozen=True)
class ServeOptions:
    """How to serve; ``adapters`` are names and folders, ``extra`` goes to ``vllm serve``."""

    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    tensor_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False
    adapters: tuple[tuple[str, Path], ...] = ()
    extra: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        return f"http://{host}:{self.port}"


def merged_folder(source: str | Path) -> Path:
    """The checkpoint to serve: a run's ``merged/``, a folder, or the copy of a hub id.

    Raises:
        CheckpointError: an adapter, a run that was not merged, or an incomplete checkpoint.
    """
    from moe_finetune.checkpoint.opened import open_checkpoint
    from moe_finetune.models.loading import local_folder

    folder = local_folder(checkpoint_in(source))
    open_checkpoint(folder, values=True)
    return folder


def serve_command(
    folder: Path,
    options: ServeOptions,
    cpu: bool,
    adapters: Mapping[str, Sequence[str]] | None = None,
) -> list[str]:
    """The arguments of ``vllm serve`` for a checkpoint folder.

    On the CPU build it runs eagerly in float32 unless ``extra`` says otherwise.

    Args:
        adapters: the options of :func:`adapter_arguments`.

    Raises:
        RecipeError: an option that is never allowed, or that is given twice.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)]
    ours: dict[str, Sequence[str]] = {
        "--host": [options.host],
        "--port": [str(options.port)],
        "--served-model-name": [options.name or checkpoint_name(folder)],
    }
    if options.tensor_parallel > 1:
        ours["--tensor-parallel-size"] = [str(options.tensor_parallel)]
    if options.data_parallel > 1:
        ours["--data-parallel-size"] = [str(options.data_parallel)]
    if options.expert_parallel:
        ours["--enable-expert-parallel"] = []
    ours |= adapters or {}
    extra_names = {item.partition("=")[0].replace("_", "-") for item in options.extra}
    if "--trust-remote-code" in extra_names:
        raise RecipeError(
            "--trust-remote-code: code from a checkpoint is never executed; leave it out"
        )
    twice = sorted(extra_names & set(ours))
    if twice:
        raise RecipeError(f"{twice[0]} is set by serve already; use serve's own option")
    if cpu:
        defaults: dict[str, Sequence[str]] = {"--dtype": ["float32"], "--enforce-eager": []}
        if "--dtype" not in extra_names:  # see engine_arguments: AMX's kernel has no float32
            defaults["--attention-backend"] = ["CPU_MLA"]
        ours |= {key: value for key, value in defaults.items() if key not in extra_names}
    for key, values in ours.items():
        command += [key, *values]
    return [*command, *options.extra]


def serve(source: str | Path, options: ServeOptions, timeout: float = 1800.0) -> int:
    """Serve a checkpoint until it is interrupted; return the exit code for the command line.

    Raises:
        CheckpointError, AdapterError, RecipeError, DependencyError: before anything starts.
        OSError: the port is in use.
    """
    folder = merged_folder(source)
    require_vllm()
    name = options.name or checkpoint_name(source)
    options = replace(options, name=name)
    if name in dict(options.adapters):
        raise RecipeError(f"--adapter {name}: the base has this name; write NAME=FOLDER")
    with tempfile.TemporaryDirectory(prefix="moe-finetune-") as scratch:
        cpu = is_cpu_build()
        arguments = None
        if options.adapters:
            adapters = checked_adapters(folder, options.adapters, cpu, Path(scratch))
            architecture = read_object(folder / "config.json", CheckpointError, COPY_AGAIN)
            named = (architecture.get("architectures") or [""])[0]
            support = ask_vllm(named, [adapter.folder for _, adapter in adapters])
            arguments = adapter_arguments(folder, adapters, support)
        command = serve_command(folder, options, cpu, arguments)
        environment = {**CPU_KV_CACHE, **os.environ} if cpu else dict(os.environ)
        print(shlex.join(command), file=sys.stderr)

        def ready() -> None:
            print(f"serving {folder} at {options.url}/v1", flush=True)
            for served in [adapter for adapter, _ in options.adapters] or [name]:
                print(curl_line(options.url, served, has_chat_template(folder)), flush=True)

        return watch(command, options, environment, ready, timeout)


def has_chat_template(folder: Path) -> bool:
    """Whether the checkpoint's tokenizer has a chat template."""
    settings = folder / "tokenizer_config.json"
    return (folder / "chat_template.jinja").is_file() or (
        settings.is_file() and '"chat_template"' in settings.read_text(encoding="utf-8")
    )


def curl_line(url: str, name: str, chat: bool) -> str:
    """A request as a shell command."""
    body: dict[str, Any] = {"model": name, "max_tokens": 32}
    if chat:
        path, body["messages"] = "chat/completions", [{"role": "user", "content": "Hello"}]
    else:
        path, body["prompt"] = "completions", "Hello"
    return shlex.join(
        ["curl", f"{url}/v1/{path}", "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    )


def watch(
    command: Sequence[str],
    options: ServeOptions,
    environment: Mapping[str, str],
    ready: Callable[[], None],
    timeout: float,
) -> int:
    """Start ``command``, call ``ready`` once ``/health`` answers, and stay until it ends.

    Its output goes to stderr. An interrupt or SIGTERM stops its whole process group and raises
    KeyboardInterrupt; when this process is killed, all of it is.

    Returns 0 after a server that ended by itself with 0; 1, after its last lines, when it failed or
    was not ready within ``timeout`` seconds.
    """
    refuse_used_port(options.host, options.port)
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    previous_handler = signal.signal(signal.SIGTERM, _interrupt)
    process = subprocess.Popen(
        supervised(command),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    reader = threading.Thread(target=_copy, args=(process.stdout, tail), daemon=True)
    reader.start()
    try:
        answered = _wait_ready(process, f"{options.url}/health", timeout)
        if answered:
            ready()
            process.wait()
        code = process.poll()
        if code is not None:
            reader.join(5)  # its last lines
        if answered and code == 0:
            return 0
        what = f"was not ready within {timeout:g} s" if code is None else f"ended with {code}"
        last = "\n".join(tail)
        print(f"error: the server {what}; its last lines:\n{last}", file=sys.stderr)
        return 1
    finally:
        stop(process)
        signal.signal(signal.SIGTERM, previous_handler)


def refuse_used_port(host: str, port: int) -> None:
    """Raise OSError if the port is in use: its answers would be taken for the server's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise OSError(
                f"{host}:{port} cannot be used ({error}); choose another --port"
            ) from None


def stop(process: subprocess.Popen[str]) -> None:
    """End the process group: interrupt first, then terminate, then kill."""
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signal_number)
        except ProcessLookupError:
            break
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _wait_ready(process: subprocess.Popen[str], url: str, timeout: float) -> bool:
    end = time.monotonic() + timeout
    while process.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return True
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.2)
    return False


def _copy(stream: IO[str], tail: deque[str]) -> None:
    for line in stream:
        sys.stderr.write(line)
        plain = re.sub(r"\x1b\[[0-9;]*m", "", line.rstrip())
        if plain:
            tail.append(plain)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
