"""The three ways to ask a model: vLLM in process, a running server, transformers.

Each opens as a :class:`Backend` that holds one lm-eval model; it can be used for many tasks and
suites. Prompts, stop rules and few-shot examples are lm-eval's, the same for all of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.errors import CheckpointError, DependencyError, EvaluationError, did_you_mean
from moe_finetune.evaluation.exchange import ServerError, ask
from moe_finetune.io.checkpoint_files import read_config
from moe_finetune.io.config_file import DTYPES
from moe_finetune.io.hashes import checkpoint_hash, sha256_json
from moe_finetune.io.terminal import terminal
from moe_finetune.vllm.install import require_vllm

if TYPE_CHECKING:
    from moe_finetune.moe.hooks import Recorder

BACKENDS = ("vllm", "hf", "server")


@dataclass
class Backend:
    """An opened model.

    Attributes:
        kind: ``"vllm"``, ``"hf"`` or ``"server"``.
        lm: the lm-eval model.
        identity: content hash of the checkpoint (and adapter); part of every cache key.
        checkpoint: the folder, or the server's model name.
        settings: all that can change a reply, for results.json and cache keys.
        chunk: requests that are asked for and stored together.
        notes: lines the user must see.
        routing: hooks that apply an adapter's routing bias, or None.
    """

    kind: str
    lm: Any
    identity: str
    checkpoint: str
    settings: dict[str, Any]
    chunk: int
    notes: list[str] = field(default_factory=list)
    routing: Recorder | None = None

    @property
    def max_length(self) -> int | None:
        """Context length in tokens, or None when the server does not tell."""
        return getattr(self.lm, "max_length", None)

    def close(self) -> None:
        """Free the engine."""
        if self.kind == "vllm":
            from moe_finetune.vllm.engine import shutdown

            shutdown(self.lm)
        if self.routing is not None:
            self.routing.restore()
        self.lm = None

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_backend(
    checkpoint: str | Path,
    backend: str | None = None,
    *,
    vllm: dict[str, Any] | None = None,
    adapter: str | Path | None = None,
    base_url: str | None = None,
    model: str | None = None,
    batch_size: int | str = "auto",
    dtype: str = "auto",
    seed: int = 0,
) -> Backend:
    """Open a checkpoint for evaluation.

    Args:
        checkpoint: folder of an ordinary checkpoint, or its hub id.
        backend: ``"vllm"``, ``"hf"``, ``"server"``; None takes vLLM where it can be used and
            transformers, with a visible line, where it cannot.
        vllm: engine arguments passed through (``tensor_parallel_size``, ``max_model_len``,
            ``gpu_memory_utilization`` with default 0.9, ...).
        adapter: PEFT adapter to load over the checkpoint (transformers only).
        base_url: the server's address, ``http://host:8000/v1``.
        model: the server's name for the model; its only model unless given.
        batch_size: an int, or ``"auto"``.
        dtype: ``"auto"``, ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        seed: seed of the engine.

    Raises:
        CheckpointError: the folder is not a checkpoint.
        DependencyError: the backend was asked for and cannot be used.
        EvaluationError: unknown backend, contradictory arguments, server down or wrong model.
    """
    if backend is not None and backend not in BACKENDS:
        raise EvaluationError(f"unknown backend '{backend}'{did_you_mean(backend, BACKENDS)}")
    if dtype not in ("auto", *DTYPES):
        raise EvaluationError(f"dtype '{dtype}' is unknown{did_you_mean(dtype, ('auto', *DTYPES))}")
    if backend != "server" and (base_url or model):
        raise EvaluationError("base_url and model belong to backend 'server'")
    notes = []
    if adapter is not None and backend in (None, "vllm"):
        if backend == "vllm":
            raise EvaluationError(
                "vLLM evaluates merged checkpoints; run 'moe-finetune merge' first, or use "
                "backend 'hf' for base + adapter"
            )
        backend = "hf"
    if backend is None:
        try:
            require_vllm()
            backend = "vllm"
        except DependencyError as error:
            backend = "hf"
            notes.append(f"evaluating with transformers: {error}")
            terminal().say(notes[-1], "warning")
    import moe_finetune.models  # noqa: F401  (registers native models with the Auto classes)

    if backend == "server":
        opened = _open_server(checkpoint, base_url, model, seed)
    else:
        from moe_finetune.checkpoint.gate import check_adapter
        from moe_finetune.checkpoint.opened import open_checkpoint

        folder = local_folder(checkpoint)
        base = open_checkpoint(folder, values=True)
        if adapter is not None:
            check_adapter(adapter, base)
        identity = checkpoint_hash(folder)
        if adapter is not None:
            identity = sha256_json([identity, checkpoint_hash(adapter)])
        if backend == "vllm":
            from moe_finetune.vllm.engine import open_vllm

            opened = open_vllm(folder, identity, vllm or {}, batch_size, dtype, seed)
        else:
            opened = _open_hf(folder, identity, adapter, batch_size, dtype, seed)
    opened.notes = notes
    return opened


def local_folder(checkpoint: str | Path) -> Path:
    """Return the folder of a checkpoint, fetched from the hub when it is a hub id.

    Raises:
        CheckpointError: neither a folder nor a repository that can be reached.
    """
    folder = Path(checkpoint)
    if folder.is_dir() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(checkpoint)):
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(str(checkpoint), allow_patterns=wanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise CheckpointError(
            f"checkpoint '{checkpoint}' is not a folder, and the hub gave none: {error}"
        ) from None


def package_versions(*names: str) -> dict[str, str]:
    """Return installed versions of the packages that decide about replies."""
    from importlib.metadata import version

    return {name: version(name) for name in names}


def _open_hf(
    folder: Path,
    identity: str,
    adapter: str | Path | None,
    batch_size: int | str,
    dtype: str,
    seed: int,
) -> Backend:
    import torch
    from transformers import GenerationConfig

    from moe_finetune.evaluation.hf_backend import SpecialsKeptHFLM
    from moe_finetune.models.loading import load_model
    from moe_finetune.moe.hooks import Recorder
    from moe_finetune.routing.tracing_checkpoint import stored_bias, with_adapter

    cuda = torch.cuda.is_available()
    model: Any = load_model(folder, dtype=dtype, device_map="cuda" if cuda else None)
    routing = None
    if adapter is not None:
        model = with_adapter(model, folder, Path(adapter))
        bias = stored_bias(model, Path(adapter))
        if bias is not None:
            routing = Recorder(model, perturbation=bias)
            routing.install()
    if batch_size == "auto" and not cuda:
        batch_size = 16  # lm-eval's search for the largest batch exhausts a machine without GPU
    lm = SpecialsKeptHFLM(
        pretrained=model, tokenizer=str(folder), batch_size=batch_size, trust_remote_code=False
    )
    # A checkpoint's generation defaults (repetition penalty, temperature) are no part of a task.
    model.generation_config = GenerationConfig(
        eos_token_id=model.generation_config.eos_token_id,
        bos_token_id=model.generation_config.bos_token_id,
        pad_token_id=lm.tokenizer.pad_token_id,
    )
    settings = {
        "backend": "hf",
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "batch_size": batch_size,
        "seed": seed,
        "max_length": lm.max_length,
        "versions": package_versions("lm-eval", "transformers", "torch"),
    }
    chunk = 64 if isinstance(batch_size, str) else max(batch_size, 64 // batch_size * batch_size)
    return Backend("hf", lm, identity, str(folder), settings, chunk, routing=routing)


def server_models(base_url: str, timeout: float = 10) -> dict[str, str]:
    """Return the models that an OpenAI-compatible server offers: name -> folder, where it tells.

    Raises:
        EvaluationError: it does not answer, or not as such a server does.
    """
    url = base_url.rstrip("/") + "/models"
    if not url.startswith(("http://", "https://")):
        raise EvaluationError(f"base_url '{base_url}' is no http address")
    try:
        reply = ask(url, seconds=timeout)
    except ServerError as error:
        raise EvaluationError(
            f"no server answers at {url} ({error}); start one with 'moe-finetune serve'"
        ) from None
    entries = reply.get("data") if isinstance(reply, dict) else None
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("id"), str) for entry in entries
    ):
        raise EvaluationError(
            f"{url} does not answer like an OpenAI-compatible server ({reply!r:.200})"
        )
    return {entry["id"]: str(entry.get("root") or "") for entry in entries}


def _open_server(
    checkpoint: str | Path, base_url: str | None, model: str | None, seed: int
) -> Backend:
    if base_url is None:
        raise EvaluationError(
            "backend 'server' needs base_url, for example http://localhost:8000/v1"
        )
    offered = server_models(base_url)
    if model is None and len(offered) == 1:
        model = next(iter(offered))
    if model not in offered:
        raise EvaluationError(
            f"the server at {base_url} has no model '{model}'{did_you_mean(str(model), offered)}"
        )
    folder = Path(checkpoint)
    has_folder = folder.is_dir()
    max_length = 2048
    if has_folder:
        config = read_config(folder)
        max_length = int(config.get("max_position_embeddings") or max_length)
    try:
        from moe_finetune.evaluation.server_client import CheckedCompletions

        lm = CheckedCompletions(
            base_url=base_url.rstrip("/") + "/completions",
            model=model,
            tokenizer=str(folder) if has_folder else str(checkpoint),
            tokenizer_backend="huggingface",
            tokenized_requests=True,
            max_length=max_length,
            num_concurrent=8,
            seed=seed,
            trust_remote_code=False,
        )
    except ModuleNotFoundError as error:
        raise DependencyError(f"backend 'server' needs lm-eval[api]: {error}") from None
    content = checkpoint_hash(folder) if has_folder else str(checkpoint)
    served = Path(offered[model])
    if has_folder and (served / "config.json").is_file() and checkpoint_hash(served) != content:
        raise EvaluationError(
            f"the server at {base_url} serves {served} as '{model}', which is another checkpoint "
            f"than {folder}"
        )
    # Where the server does not tell its folder, nobody can know that its weights are these.
    identity = sha256_json(["server", base_url, model, content])
    settings = {
        "backend": "server",
        "base_url": base_url,
        "model": model,
        "seed": seed,
        "max_length": max_length,
        "versions": package_versions("lm-eval"),
    }
    return Backend("server", lm, identity, str(checkpoint), settings, 64)
