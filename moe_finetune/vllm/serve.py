"""``serve``: ``vllm serve`` on a merged checkpoint, watched until it answers and stopped whole."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from moe_finetune.errors import AdapterError, RecipeError
from moe_finetune.io.run_folder import checkpoint_in
from moe_finetune.vllm.install import CPU_KV_CACHE, is_cpu_build, require_vllm
from moe_finetune.vllm.supervisor import supervised

TAIL_LINES = 30
STOP_SECONDS = 30.0
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM 0.32 takes for ``--max-lora-rank``."""
# vLLM declares LoRA for these classes; latent attention it folds into other weights on loading.
ADAPTED_ATTENTION = ("qwen3_moe", "olmoe", "mixtral")
ADAPTED_EXPERTS = ("qwen3_moe",)


@dataclass(frozen=True)
class ServeOptions:
    """How to serve; ``extra`` goes to ``vllm serve`` as it is."""

    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    tensor_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False
    adapter: Path | None = None
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


def serve_command(folder: Path, options: ServeOptions, cpu: bool) -> list[str]:
    """The arguments of ``vllm serve`` for a checkpoint folder.

    On the CPU build it runs eagerly in float32 unless ``extra`` says otherwise.

    Raises:
        RecipeError: an option that is never passed on, or that is given twice.
        AdapterError: an adapter that vLLM 0.32 cannot serve without merging, and why.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)]
    ours: dict[str, str | None] = {
        "--host": options.host,
        "--port": str(options.port),
        "--served-model-name": options.name or folder.resolve().name,
    }
    if options.tensor_parallel > 1:
        ours["--tensor-parallel-size"] = str(options.tensor_parallel)
    if options.data_parallel > 1:
        ours["--data-parallel-size"] = str(options.data_parallel)
    if options.expert_parallel:
        ours["--enable-expert-parallel"] = None
    if options.adapter is not None:
        ours |= adapter_arguments(folder, options.adapter, cpu)
    given = {item.partition("=")[0].replace("_", "-") for item in options.extra}
    if "--trust-remote-code" in given:
        raise RecipeError(
            "--trust-remote-code: code from a checkpoint is never executed; leave it out"
        )
    twice = sorted(given & set(ours))
    if twice:
        raise RecipeError(f"{twice[0]} is set by serve already; use serve's own option")
    if cpu:
        defaults: dict[str, str | None] = {"--dtype": "float32", "--enforce-eager": None}
        if "--dtype" not in given:  # see engine_arguments: AMX's kernel has no float32
            defaults["--attention-backend"] = "CPU_MLA"
        ours |= {key: value for key, value in defaults.items() if key not in given}
    for key, value in ours.items():
        command += [key] if value is None else [key, value]
    return [*command, *options.extra]


def adapter_arguments(folder: Path, adapter: Path, cpu: bool) -> dict[str, str | None]:
    """Options that serve ``adapter`` beside the base in ``folder``, under the adapter's name.

    Raises:
        AdapterError: vLLM 0.32 cannot; the reason is named, and the remedy is to merge.
    """
    from moe_finetune.checkpoint.adapter import BIAS_FILE
    from moe_finetune.checkpoint.gate import check_adapter
    from moe_finetune.checkpoint.opened import open_checkpoint

    base = open_checkpoint(folder)
    opened, family = check_adapter(adapter, base), base.family
    reason = None
    experts = [key for key in opened.tensors if f".{family.experts_name}." in key]
    attention = [key for key in opened.tensors if ".self_attn." in key and "lora_" in key]
    others = sorted(set(opened.tensors) - set(experts) - set(attention))
    if opened.metadata.experts is not None:
        reason = "it holds chosen experts only, a packing that vLLM does not read"
    elif (adapter / BIAS_FILE).is_file():
        reason = "it has a routing bias, which an adapter cannot carry into vLLM"
    elif opened.config.get("modules_to_save"):
        reason = f"it replaces whole modules ({', '.join(opened.config['modules_to_save'])})"
    elif others:
        reason = f"'{others[0]}' is neither attention nor routed experts"
    elif attention and family.name not in ADAPTED_ATTENTION:
        reason = f"vLLM does not apply LoRA to the attention of {family.title}"
    elif experts and family.name not in ADAPTED_EXPERTS:
        reason = f"vLLM does not read LoRA on the experts of {family.title}"
    elif cpu:
        reason = "vLLM serves LoRA on MoE models on GPUs only"
    rank = max((opened.rank(key) for key in opened.tensors), default=1)
    if reason is None and rank > LORA_RANKS[-1]:
        reason = f"its rank {rank} is above vLLM's {LORA_RANKS[-1]}"
    if reason is not None:
        raise AdapterError(
            f"{adapter}: vLLM 0.32 cannot serve this adapter without merging: {reason}; merge it "
            "with 'moe-finetune merge' and serve the merged checkpoint"
        )
    module = {"name": adapter.resolve().name, "path": str(adapter.resolve())}
    found: dict[str, str | None] = {
        "--enable-lora": None,
        "--max-lora-rank": str(next(known for known in LORA_RANKS if known >= rank)),
    }
    if experts:
        found["--enable-mixed-moe-lora-format"] = None
        found["--lora-modules"] = json.dumps({**module, "is_3d_lora_weight": True})
    else:
        found["--lora-modules"] = json.dumps(module)
    return found


def serve(source: str | Path, options: ServeOptions, timeout: float = 1800.0) -> int:
    """Serve a checkpoint until it is interrupted; return the exit code for the command line.

    Raises:
        CheckpointError, AdapterError, RecipeError, DependencyError: before anything starts.
        OSError: the port is in use.
    """
    folder = merged_folder(source)
    require_vllm()
    cpu = is_cpu_build()
    command = serve_command(folder, options, cpu)
    environment = {**CPU_KV_CACHE, **os.environ} if cpu else dict(os.environ)
    name = options.name or folder.resolve().name
    if options.adapter is not None:
        name = options.adapter.resolve().name
    print(shlex.join(command), file=sys.stderr)

    def ready() -> None:
        print(f"serving {folder} at {options.url}/v1", flush=True)
        print(curl_line(options.url, name, has_chat_template(folder)), flush=True)

    return watch(command, options, environment, ready, timeout)


def has_chat_template(folder: Path) -> bool:
    """Whether the checkpoint's tokenizer renders chats."""
    settings = folder / "tokenizer_config.json"
    return (folder / "chat_template.jinja").is_file() or (
        settings.is_file() and '"chat_template"' in settings.read_text(encoding="utf-8")
    )


def curl_line(url: str, name: str, chat: bool) -> str:
    """A request to copy into a shell."""
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
    before = signal.signal(signal.SIGTERM, _interrupt)
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
        if not _wait_ready(process, f"{options.url}/health", timeout):
            code = process.poll()
            if code is not None:
                reader.join(5)
            what = f"was not ready within {timeout:g} s" if code is None else f"ended with {code}"
            last = "\n".join(tail)
            print(f"error: the server {what}; its last lines:\n{last}", file=sys.stderr)
            return 1
        ready()
        code = process.wait()
        reader.join(5)
        if code:
            last = "\n".join(tail)
            print(f"error: the server ended with {code}; its last lines:\n{last}", file=sys.stderr)
        return 1 if code else 0
    finally:
        stop(process)
        signal.signal(signal.SIGTERM, before)


def refuse_used_port(host: str, port: int) -> None:
    """Raise OSError when something listens there already: its answers would be taken for ours."""
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
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
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
