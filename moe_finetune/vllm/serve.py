"""``serve``: run ``vllm serve`` on a merged checkpoint."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from moe_finetune.errors import MachineError, RecipeError
from moe_finetune.io.children import children, how_it_ended
from moe_finetune.io.run_folder import checkpoint_in, checkpoint_name
from moe_finetune.io.yaml_file import read_yaml
from moe_finetune.vllm.install import CPU_KV_CACHE, is_cpu_build, require_vllm

if TYPE_CHECKING:
    from moe_finetune.checkpoint.open import Checkpoint

VLLM = "vllm.entrypoints.cli.main"


def open_merged(source: str | Path) -> Checkpoint:
    """The checkpoint to serve: a run's ``merged/``, a folder, or a hub id's local copy."""
    from moe_finetune.checkpoint.open import open_checkpoint
    from moe_finetune.models.config_and_tokenizer import local_folder

    return open_checkpoint(local_folder(checkpoint_in(source)), values=True)


def serve_command(
    folder: Path,
    name: str,
    cpu: bool,
    arguments: Sequence[str] = (),
) -> list[str]:
    """The command that serves a checkpoint as ``name`` with the ``arguments`` of ``vllm serve``.

    Unless ``arguments`` override it, only this machine can reach the server, and vLLM's ``cpu``
    build runs eagerly in float32.
    """
    words = [*config_arguments(arguments), *arguments]
    refuse_remote_code(words)
    user_options = {word.partition("=")[0].replace("_", "-") for word in words}
    if "--adapter" in user_options:
        raise RecipeError(
            "--adapter: serve serves merged checkpoints; `moe-finetune convert ADAPTER --to vllm` "
            "prints the command that serves an adapter unmerged"
        )
    defaults: dict[str, Sequence[str]] = {
        "--host": ["127.0.0.1"],
        "--served-model-name": [name],
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
    """The options and values in the file of ``--config``, which vLLM puts before the others."""
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


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The address in vLLM's ``arguments``."""
    parser = argparse.ArgumentParser("moe-finetune serve", add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--uds")
    parser.add_argument("--headless", action="store_true")
    return parser.parse_known_args(arguments)[0]


def refuse_used_port(host: str, port: int) -> None:
    """Raise RecipeError where a server answers: vLLM's data parallelism would share its port."""
    with suppress(OSError), socket.create_connection((host, port), timeout=5):
        raise RecipeError(f"{host}:{port}: another server uses this port; stop it or use another")


def serve(source: str | Path, arguments: Sequence[str]) -> int:
    """Check the checkpoint, run ``vllm serve`` until it ends, and return its exit code."""
    merged, name = open_merged(source), checkpoint_name(source)
    command = serve_command(merged.folder, name, is_cpu_build(), arguments)
    chosen = read_arguments([*config_arguments(arguments), *arguments])
    if not (chosen.uds or chosen.headless):
        refuse_used_port(chosen.host, chosen.port)
    require_vllm(try_import=False, instead="serve the checkpoint with another program")
    if is_cpu_build():
        os.environ.update({**CPU_KV_CACHE, **os.environ})
    print(shlex.join(command), file=sys.stderr, flush=True)
    if not (chosen.uds or chosen.headless):
        host = "127.0.0.1" if chosen.host == "0.0.0.0" else chosen.host
        address = f"http://{host}:{chosen.port}"
        check = shlex.join(["moe-finetune", "verify", str(source), "--served", address])
        print(f"once it answers, check it: {check}", file=sys.stderr, flush=True)
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
