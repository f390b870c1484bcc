"""``serve``: run ``vllm serve`` on a merged checkpoint, or on a base with adapters."""

from __future__ import annotations

import argparse
import os
import runpy
import shlex
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from moe_finetune.errors import RecipeError
from moe_finetune.io.run_folder import checkpoint_in, checkpoint_name
from moe_finetune.vllm.adapters import adapter_arguments, checked_adapters, named_adapters
from moe_finetune.vllm.install import CPU_KV_CACHE, is_cpu_build, require_vllm
from moe_finetune.vllm.lora_support import ask_vllm

if TYPE_CHECKING:
    from moe_finetune.checkpoint.contents import Checkpoint

VLLM = "vllm.entrypoints.cli.main"


def open_merged(source: str | Path) -> Checkpoint:
    """The checkpoint to serve: a run's ``merged/``, a folder, or a hub id's local copy.

    Raises:
        CheckpointError: ``source`` is an adapter, a run that was not merged, or an incomplete
            checkpoint.
    """
    from moe_finetune.checkpoint.opened import open_checkpoint
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
        RecipeError: an option is not allowed, or is already set by ``adapters``.
    """
    user_options = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    # vLLM's parser also takes the beginning of an option, such as --trust-remote.
    if any("--trust-remote-code".startswith(option) for option in user_options - {"", "-", "--"}):
        raise RecipeError(
            "--trust-remote-code: code from a checkpoint is never executed; leave it out"
        )
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
    command = [sys.executable, "-m", VLLM, "serve", str(folder)]
    for option, values in defaults.items():
        if option not in user_options:
            command += [option, *values]
    return [*command, *arguments]


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


def serve(source: str | Path, adapters: Sequence[str], arguments: Sequence[str]) -> None:
    """Check the checkpoint and adapters, and run ``vllm serve`` until it ends.

    Args:
        adapters: ``NAME=FOLDER`` or folders, adapters to serve with the base ``source``.
        arguments: of ``vllm serve``.

    Raises:
        CheckpointError, AdapterError, RecipeError, DependencyError: before the server starts.
    """
    merged, name, named = open_merged(source), checkpoint_name(source), named_adapters(adapters)
    chosen = read_arguments(name, arguments)
    for base in chosen.served_model_name:
        if base in dict(named):  # vLLM would answer with the base
            raise RecipeError(
                f"--adapter {base}: the base already has this name; write NAME=FOLDER"
            )
    if not (chosen.uds or chosen.headless):
        refuse_used_port(chosen.host, chosen.port)
    require_vllm()
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
        sys.argv = ["vllm", *command[3:]]
        # As the main program, because vLLM's processes first import their parent's main module.
        runpy.run_module(VLLM, run_name="__main__", alter_sys=True)
