"""``serve``: run ``vllm serve`` on a merged checkpoint, or on a base with adapters."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from moe_finetune.errors import MachineError, RecipeError
from moe_finetune.io.children import children, how_it_ended
from moe_finetune.io.run_folder import checkpoint_in, checkpoint_name
from moe_finetune.io.yaml_file import read_yaml
from moe_finetune.vllm.adapters import adapter_arguments, checked_adapters, named_adapters
from moe_finetune.vllm.install import CPU_KV_CACHE, is_cpu_build, require_vllm
from moe_finetune.vllm.lora_support import ask_vllm

if TYPE_CHECKING:
    from moe_finetune.checkpoint.open import Checkpoint

VLLM = "vllm.entrypoints.cli.main"


def open_merged(source: str | Path) -> Checkpoint:
    """The checkpoint to serve: a run's ``merged/``, a folder, or a hub id's local copy.

    Raises:
        CheckpointError: ``source`` is an adapter, a run that was not merged, or an incomplete
            checkpoint.
    """
    from moe_finetune.checkpoint.open import open_checkpoint
    from moe_finetune.models.loading import local_folder

    return open_checkpoint(local_folder(checkpoint_in(source)), values=True)


def serve_command(
    folder: Path,
    name: str,
    cpu: bool,
    arguments: Sequence[str] = (),
    adapters: Mapping[str, Sequence[str]] | None = None,
) -> list[str]:
    """The command that serves a checkpoint as ``name`` with the ``arguments`` of ``vllm serve``.

    Unless ``arguments`` override it, only this machine can reach the server, and vLLM's CPU build
    runs eagerly in float32.

    Args:
        cpu: whether vLLM is the CPU build.
        adapters: the options of :func:`adapter_arguments`.

    Raises:
        RecipeError: an option is not allowed, or is already set by ``adapters``; the file of
            ``--config`` cannot be read.
    """
    words = [*config_arguments(arguments), *arguments]
    refuse_remote_code(words)
    user_options = {word.partition("=")[0].replace("_", "-") for word in words}
    for option in adapters or ():
        if option in user_options:
            raise RecipeError(f"{option}: is set by --adapter; leave one of the two out")
    defaults: dict[str, Sequence[str]] = {
        "--host": ["127.0.0.1"],
        "--served-model-name": [name],
        **(adapters or {}),
    }
    if cpu:
        defaults |= {"--dtype": ["float32"], "--enforce-eager": []}
        if "--dtype" not in user_options:  # see engine_arguments: the AMX kernel has no float32
            defaults["--attention-backend"] = ["CPU_MLA"]
    command = [sys.executable, "-P", "-m", VLLM, "serve", str(folder)]
    for option, values in defaults.items():
        if option not in user_options:
            command += [option, *values]
    return [*command, *arguments]


def config_arguments(arguments: Sequence[str]) -> list[str]:
    """The options and values in the file of ``--config``, which vLLM puts before the others.

    Raises:
        RecipeError: the file is missing, or not a mapping.
    """
    if "--config" not in arguments[:-1]:
        return []
    file = Path(arguments[arguments.index("--config") + 1])
    values = read_yaml(file, RecipeError)
    if not isinstance(values, dict):
        raise RecipeError(f"{file}: expected options of vllm serve, such as 'port: 8001'")
    words: list[str] = []
    for key, value in values.items():
        items = value if isinstance(value, list) else [value]
        texts = [item if isinstance(item, str) else json.dumps(item, default=str) for item in items]
        words += [f"--{key}", *texts]
    return words


def refuse_remote_code(words: Sequence[str]) -> None:
    """Raise RecipeError for ``--trust-remote-code``, also shortened or inside another value."""
    for word in words:
        text = word.replace("_", "-")
        option = text.partition("=")[0]
        # vLLM's parser also takes the beginning of an option, such as --trust-remote.
        shortened = len(option) > 2 and "--trust-remote-code".startswith(option)
        if shortened or "trust-remote-code" in text:
            raise RecipeError(
                "--trust-remote-code: code from a checkpoint is never executed; leave it out, also "
                "in the file of --config"
            )


def read_arguments(name: str, arguments: Sequence[str]) -> argparse.Namespace:
    """The base's names and the address from vLLM's ``arguments``; ``name`` is the default."""
    parser = argparse.ArgumentParser("moe-finetune serve", add_help=False, allow_abbrev=False)
    parser.add_argument("--served-model-name", "--served_model_name", nargs="+", default=[name])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--uds")
    parser.add_argument("--headless", action="store_true")
    return parser.parse_known_args(arguments)[0]


def refuse_used_port(host: str, port: int) -> None:
    """Raise RecipeError where a server answers: vLLM's data parallelism would share its port."""
    with suppress(OSError), socket.create_connection((host, port), timeout=5):
        raise RecipeError(f"{host}:{port}: another server uses this port; stop it or use another")


def serve(source: str | Path, adapters: Sequence[str], arguments: Sequence[str]) -> int:
    """Check checkpoint and adapters, run ``vllm serve`` until it ends, and return its exit code.

    Args:
        adapters: ``NAME=FOLDER`` or folders, adapters to serve with the base ``source``.
        arguments: of ``vllm serve``.

    Raises:
        KeyboardInterrupt: SIGINT or SIGTERM, after vLLM's processes have ended.
        MachineError: a signal ended the server.
        CheckpointError, AdapterError, RecipeError, DependencyError: before the server starts.
    """
    merged, name, named = open_merged(source), checkpoint_name(source), named_adapters(adapters)
    chosen = read_arguments(name, [*config_arguments(arguments), *arguments])
    for base in chosen.served_model_name:
        if base in dict(named):  # vLLM would answer with the base
            raise RecipeError(
                f"--adapter {base}: the base already has this name; write NAME=FOLDER"
            )
    if not (chosen.uds or chosen.headless):
        refuse_used_port(chosen.host, chosen.port)
    require_vllm(try_import=False, instead="serve the checkpoint with another program")
    cpu = is_cpu_build()
    with tempfile.TemporaryDirectory(prefix="moe-finetune-") as scratch:
        options = None
        if named:
            readable = checked_adapters(merged, named, cpu, Path(scratch))
            architecture = (merged.config.get("architectures") or [""])[0]
            support = ask_vllm(architecture, [adapter.folder for _, adapter in readable])
            options = adapter_arguments(merged, readable, support)
        command = serve_command(merged.folder, name, cpu, arguments, options)
        if cpu:
            os.environ.update({**CPU_KV_CACHE, **os.environ})
        print(shlex.join(command), file=sys.stderr, flush=True)
        return run_server(command)


def run_server(command: Sequence[str]) -> int:
    """Run a server until it ends, and return its exit code.

    A process of its own, because vLLM 0.32 that is loading drops the interrupt and waits for an
    engine that waits for it, for up to ten minutes.
    """
    with children(servers=True) as group:
        process = group.popen("server", command)
        while process.poll() is None and not group.asked:
            time.sleep(0.1)
    if process.returncode < 0:
        raise MachineError(f"vllm serve: {how_it_ended(process.returncode)}")
    return process.returncode
