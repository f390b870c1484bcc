"""Record a checkpoint's routing in vLLM as a trace; vLLM returns only the selected experts.

On GPUs vLLM returns them with each output (``enable_return_routed_experts``). Its CPU build does
not, so there the engine runs in this process, one sequence at a time, with hooks on its routers.

Shape legend: T tokens, L MoE layers, K selected.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from moe_finetune.errors import CaptureError
from moe_finetune.routing.trace import TraceWriter
from moe_finetune.vllm.engine import engine_arguments
from moe_finetune.vllm.install import is_cpu_build, require_vllm

AT_ONCE = 256
# Returned experts need the prefix cache; with hooks, every token must be computed.
ON_CPU = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, {"enable_prefix_caching": False}
ON_GPU = (
    {"VLLM_USE_V2_MODEL_RUNNER": "1"},
    {"enable_prefix_caching": True, "enable_return_routed_experts": True},
)


def trace_vllm(
    checkpoint: Path,
    sequences: Mapping[str, Sequence[np.ndarray]],
    folder: Path,
    *,
    name: str,
    dtype: str = "auto",
    engine: Mapping[str, Any] | None = None,
) -> None:
    """Write the routing of ``sequences`` (token ids by domain) in vLLM to the trace ``folder``.

    The trace contains selected experts and token ids, without weights, probabilities or embeddings.

    Args:
        checkpoint: folder of an ordinary checkpoint.
        sequences: by domain, arrays of token ids, one per sequence.
        folder: the trace's folder, new or empty.
        name: name of the source, stored in the trace.
        dtype: computation type; ``auto`` is float32 on the CPU build.
        engine: vLLM's own arguments, such as ``tensor_parallel_size``.

    Raises:
        DependencyError: vLLM cannot be used here.
        CaptureError: vLLM cannot load the checkpoint this way, or does not return its routing.
    """
    from moe_finetune.models.loading import open_config
    from moe_finetune.moe.layers import config_facts

    config, family = open_config(checkpoint)
    facts = config_facts(config, family)
    texts = [ids_T for rows in sequences.values() for ids_T in rows]
    domains = [domain for domain, rows in sequences.items() for _ in rows]
    writer = TraceWriter(
        folder,
        model_type=config.model_type,
        checkpoint=name,
        layers=facts.moe_layers,
        num_experts=facts.num_experts,
        top_k=facts.top_k,
        hidden_size=config.get_text_config().hidden_size,
        domains=tuple(sequences),
    )
    with writer:
        chosen = routed(checkpoint, texts, facts.moe_layers, facts.top_k, dtype, engine or {})
        rows = zip(texts, domains, chosen, strict=True)
        for sequence, (ids_T, domain, index_TLK) in enumerate(rows):
            writer.append(index_TLK, None, np.full(len(ids_T), sequence), domain, token_ids_T=ids_T)


def routed(
    checkpoint: Path,
    texts: Sequence[np.ndarray],
    layers: Sequence[int],
    top_k: int,
    dtype: str,
    overrides: Mapping[str, Any],
) -> Iterator[np.ndarray]:
    """Yield the selected experts ``(T, L, K)`` of each of ``texts``, in their order."""
    longest = max(len(ids_T) for ids_T in texts)
    with open_engine(checkpoint, longest, dtype, overrides) as (llm, heard):
        for start in range(0, len(texts), AT_ONCE if heard is None else 1):
            batch = texts[start : start + (AT_ONCE if heard is None else 1)]
            outputs = _run(llm, batch)
            for ids_T, output in zip(batch, outputs, strict=True):
                experts = output.routed_experts if heard is None else heard.take()
                yield selection(experts, len(ids_T), layers, top_k)


def selection(
    routed: np.ndarray | None, tokens: int, layers: Sequence[int], top_k: int
) -> np.ndarray:
    """``(T, L, K)`` int64 from ``(T or more, decoder layers, K)``; dense layers are left out.

    Raises:
        CaptureError: vLLM returned no routing, or an array of the wrong shape.
    """
    shape = None if routed is None else routed.shape
    if (
        routed is None
        or len(routed) < tokens
        or routed.shape[1] <= max(layers)
        or routed.shape[2] != top_k
    ):
        raise CaptureError(
            f"vLLM returned experts of shape {shape}, expected ({tokens} tokens, at least "
            f"{max(layers) + 1} layers, {top_k}); record with --backend hf"
        )
    return routed[:tokens, list(layers)].astype(np.int64)


class Heard:
    """Records what the routers of an engine in this process select."""

    def __init__(self) -> None:
        self._chunks: dict[int, list[np.ndarray]] = {}

    def bind(self, model: Any) -> int:
        """Hook every MoE layer of vLLM's ``model``; return their number."""
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        runners = [module for module in model.modules() if isinstance(module, MoERunner)]
        for runner in runners:
            runner.router.set_capture_fn(partial(self._note, runner.layer_id))
        return len(runners)

    def _note(self, layer: int, index_TK: Any) -> None:
        # A copy: the engine writes its next step into the same memory.
        self._chunks.setdefault(layer, []).append(index_TK.cpu().numpy().copy())

    def take(self) -> np.ndarray | None:
        """Return and clear ``(T, decoder layers, K)`` of the forwards since the last call."""
        chunks, self._chunks = self._chunks, {}
        if not chunks:
            return None
        rows = {layer: np.concatenate(parts) for layer, parts in chunks.items()}
        first = next(iter(rows.values()))
        if any(row.shape != first.shape for row in rows.values()):
            raise CaptureError(
                f"vLLM's layers routed different numbers of tokens: "
                f"{ {layer: len(row) for layer, row in rows.items()} }; record with --backend hf"
            )
        experts = np.zeros((len(first), max(rows) + 1, first.shape[1]), first.dtype)
        for layer, row in rows.items():
            experts[:, layer] = row
        return experts


@contextmanager
def open_engine(
    checkpoint: Path, longest: int, dtype: str, overrides: Mapping[str, Any]
) -> Iterator[tuple[Any, Heard | None]]:
    """An engine for sequences of up to ``longest`` tokens; on the CPU build, with its routers."""
    require_vllm()
    cpu = is_cpu_build()
    if cpu and int(overrides.get("tensor_parallel_size") or 1) > 1:
        raise CaptureError(
            "tensor_parallel_size: the CPU build's routers can be read in this process only; "
            "leave it out"
        )
    environment, needed = ON_CPU if cpu else ON_GPU
    options = {"max_model_len": longest + 1, "skip_tokenizer_init": True, **overrides, **needed}
    arguments = engine_arguments(options, dtype)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    with _environment(environment):
        from vllm import LLM

        try:
            llm = LLM(model=str(checkpoint), **arguments)
        except (RuntimeError, ValueError, TypeError) as error:
            raise CaptureError(
                f"vLLM cannot open {checkpoint} for {longest} tokens a sequence ({error}); "
                "lower --max-length, or record with --backend hf"
            ) from error
        try:
            heard = Heard() if cpu else None
            if heard is not None and not sum(llm.apply_model(heard.bind)):
                raise CaptureError(
                    f"vLLM's model of {checkpoint} has no MoE layer that can be read; record "
                    "with --backend hf"
                )
            yield llm, heard
        finally:
            llm.llm_engine.engine_core.shutdown()


def _run(llm: Any, texts: Sequence[np.ndarray]) -> list[Any]:
    """Run ``texts`` through the engine for one token each; return the outputs in order."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": ids_T.tolist()} for ids_T in texts]
    one = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    return [answer.outputs[0] for answer in llm.generate(prompts, one, use_tqdm=False)]


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    previous = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
