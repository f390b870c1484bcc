"""The three backends: vLLM in process, a running server, transformers.

Each opens as a :class:`Backend` with one lm-eval model, for many tasks and suites. Prompts, stop
rules and few-shot examples are lm-eval's, the same for all backends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.errors import DependencyError, EvaluationError, did_you_mean
from moe_finetune.io.check_config import DTYPES
from moe_finetune.io.hashes import checkpoint_hash, sha256_json
from moe_finetune.io.terminal import terminal
from moe_finetune.vllm.engine import open_vllm, shutdown
from moe_finetune.vllm.install import is_cpu_build, require_vllm

if TYPE_CHECKING:
    from moe_finetune.checkpoint.dense_checkpoint import DenseCheckpoint
    from moe_finetune.checkpoint.open import Checkpoint
    from moe_finetune.moe.recorder.hooks import Recorder

BACKENDS = ("vllm", "hf", "server")


@dataclass
class Backend:
    """An opened model.

    ``identity`` is the content hash of checkpoint and adapter, ``settings`` all that can change a
    reply: both are in every cache key. ``chunk`` requests are sent and stored together; ``routing``
    are the hooks that apply an adapter's bias.
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
        """Context length in tokens, or None if the server does not report it."""
        return getattr(self.lm, "max_length", None)

    def close(self) -> None:
        if self.kind == "vllm":
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
    """Open a checkpoint's folder or hub id for evaluation.

    Without a ``backend``, vLLM where it can be used, otherwise transformers, with a warning.
    ``vllm`` are engine arguments; an ``adapter`` lies over the checkpoint (transformers only);
    ``model`` is a server's name for it, by default its only one.
    """
    _refuse_contradictions(backend, dtype, adapter, base_url, model)
    notes = []
    if backend is None and adapter is not None:
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
        try:
            from moe_finetune.evaluation.server import open_server
        except ModuleNotFoundError as error:
            raise DependencyError(f"backend 'server' needs lm-eval[api]: {error}") from None
        lm, settings, identity = open_server(checkpoint, base_url, model, seed)
        return Backend(
            kind="server",
            lm=lm,
            identity=identity,
            checkpoint=str(checkpoint),
            settings=settings,
            chunk=64,
            notes=notes,
        )
    from moe_finetune.checkpoint.adapters.open_adapter import check_adapter
    from moe_finetune.checkpoint.dense_checkpoint import is_dense, open_dense, refuse_adapter
    from moe_finetune.checkpoint.open import open_checkpoint
    from moe_finetune.models.config_and_tokenizer import local_folder

    folder = local_folder(checkpoint)
    base: Checkpoint | DenseCheckpoint
    opened = None
    if is_dense(folder):
        base = open_dense(folder, values=True)
        if adapter is not None:
            refuse_adapter(folder)
    else:
        base = open_checkpoint(folder, values=True, stored=True)
        opened = None if adapter is None else check_adapter(adapter, base)
    identity = checkpoint_hash(folder)
    if adapter is not None:
        identity = sha256_json([identity, checkpoint_hash(adapter)])
    routing = None
    if backend == "vllm":
        lm, settings = open_vllm(folder, vllm or {}, batch_size, dtype, seed)
        # At the end of a chunk the engine's batch runs empty; on a CPU that costs little.
        chunk = 64 if is_cpu_build() else 2048
    else:
        from moe_finetune.evaluation.transformers_backend import open_transformers

        lm, settings, routing = open_transformers(base, opened, batch_size, dtype, seed)
        size = settings["batch_size"]
        chunk = 64 if isinstance(size, str) else max(size, 64 // size * size)
    return Backend(
        kind=backend,
        lm=lm,
        identity=identity,
        checkpoint=str(folder),
        settings=settings,
        chunk=chunk,
        notes=notes,
        routing=routing,
    )


def _refuse_contradictions(
    backend: str | None,
    dtype: str,
    adapter: str | Path | None,
    base_url: str | None,
    model: str | None,
) -> None:
    """Raise EvaluationError for arguments of :func:`open_backend` that do not fit together."""
    if backend is not None and backend not in BACKENDS:
        raise EvaluationError(f"unknown backend '{backend}'{did_you_mean(backend, BACKENDS)}")
    if dtype not in ("auto", *DTYPES):
        raise EvaluationError(f"dtype '{dtype}' is unknown{did_you_mean(dtype, ('auto', *DTYPES))}")
    if backend != "server" and (base_url or model):
        raise EvaluationError("base_url and model are only valid with backend 'server'")
    if adapter is not None and backend not in (None, "hf"):
        raise EvaluationError(
            f"backend '{backend}' evaluates merged checkpoints; run 'moe-finetune merge' first, or "
            "use backend 'hf' for base + adapter"
        )
