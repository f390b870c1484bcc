"""The experts that vLLM selected for a rollout, through TRL's colocated engine or its server.

vLLM returns with each finished completion the experts of all its tokens but the last one, which
was sampled and not run: an array (tokens - 1, decoder layers, K) with zeros in dense layers. TRL
reads the tokens and their log-probabilities and drops the arrays. It has no hook for them, so its
engine's class is replaced while it builds its trainer, and a method of its client afterwards. vLLM
takes the experts of cached prompts from a store that it empties with the prefix cache.

Shape legend: B rows, P prompt positions, S positions per row, L MoE layers, E experts, K selected.
"""

import base64
import io
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_finetune.errors import CaptureError, RecipeError
from moe_finetune.losses.base import ModelFacts
from moe_finetune.moe.choice.pinned_choice import PinnedChoice, empty_choice

FLAG = "--enable-return-routed-experts"
STALE = (
    "router.replay: rollout: vLLM could not reset its prefix cache after the weights changed, so "
    "it would return experts of the former weights; the engine must not serve other requests"
)
ANSWER_S = 5.0


# -- TRL's engine and client ----------------------------------------------------------------------


@contextmanager
def engine_returns_experts() -> Iterator[None]:
    """An engine that TRL builds inside the context keeps the experts of its last outputs."""
    from trl.generation import vllm_generation

    original: Any = vllm_generation.LLM

    class RoutedLLM(original):
        routed_experts: list[np.ndarray | None]

        def __init__(self, *args: Any, **kwargs: Any):
            needed = {"enable_return_routed_experts": True, "enable_prefix_caching": True}
            super().__init__(*args, **{**kwargs, **needed})

        def generate(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().generate(*args, **kwargs)
            self.routed_experts = [c.routed_experts for output in outputs for c in output.outputs]
            return outputs

        def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
            if not super().reset_prefix_cache(*args, **kwargs):
                raise CaptureError(STALE)
            return True

    vllm_generation.LLM = RoutedLLM  # type: ignore[misc]
    try:
        yield
    finally:
        vllm_generation.LLM = original  # type: ignore[misc]


def client_returns_experts(client: Any) -> None:
    """Let TRL's client of a server keep the experts of its last completions."""
    post = client._post

    def kept(url: str, **kwargs: Any) -> Any:
        response = post(url, **kwargs)
        if url.endswith("/v1/completions"):
            client.routed_experts = [_decoded(c.get("routed_experts")) for c in response["choices"]]
        elif url.endswith("/reset_prefix_cache") and not response.get("success"):
            raise CaptureError(STALE)
        return response

    client._post = kept


def _decoded(text: str | None) -> np.ndarray | None:
    return None if text is None else np.load(io.BytesIO(base64.b64decode(text)))


def check_server(info: Mapping[str, Any], url: str) -> None:
    """Refuse a server that does not return experts; ``info`` is its configuration."""
    parallel, cache = info.get("parallel_config") or {}, info.get("cache_config") or {}
    returns = (info.get("aux_output_config") or {}).get("enable_return_routed_experts")
    obstacles = []
    if (stages := parallel.get("pipeline_parallel_size", 1)) > 1:
        obstacles.append(f"it runs with --pipeline-parallel-size {stages}")
    if not cache.get("enable_prefix_caching", True):
        obstacles.append("it runs with --no-enable-prefix-caching")
    if not returns:
        obstacles.append(f"it runs without {FLAG}")
    if obstacles:
        raise RecipeError(
            f"router.replay: rollout: the vLLM server at {url} cannot return experts: "
            f"{'; '.join(obstacles)}; start it with {FLAG} and without what is named here, or set "
            "router.replay: old_policy"
        )


def ask_server(arguments: Any) -> None:
    """:func:`check_server` for the server of TRL's config, if it already answers."""
    url = arguments.vllm_server_base_url
    url = url or f"http://{arguments.vllm_server_host}:{arguments.vllm_server_port}"
    request = f"{url.rstrip('/')}/server_info?config_format=json"
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            info = json.load(answer)["vllm_config"]
    except (urllib.error.URLError, OSError, ValueError, KeyError):
        return  # it may still start; TRL waits for it, and the trainer asks again
    check_server(info, url)


# -- arrays of a rollout --------------------------------------------------------------------------


def rolled_out(generation: Any, rows: int) -> list[np.ndarray | None]:
    """What vLLM returned for this rank's ``rows`` completions, in their order; taken once."""
    accelerator = generation.accelerator
    if generation.mode == "colocate":
        arrays, generation.llm.routed_experts = generation.llm.routed_experts, []
        if generation.tensor_parallel_size == 1:
            return arrays
        # Each rank of the group has the outputs of all.
        start = rows * torch.distributed.get_rank(group=generation.tp_group)
        return arrays[start : start + rows]
    arrays = []
    if accelerator.is_main_process:
        arrays, generation.vllm_client.routed_experts = generation.vllm_client.routed_experts, []
    if accelerator.num_processes == 1:
        return arrays
    parts = [arrays[start : start + rows] for start in range(0, len(arrays), rows)]
    received: list[Any] = [None]
    torch.distributed.scatter_object_list(received, parts if parts else None, src=0)
    return received[0]


def check_rolled_out(
    arrays: Sequence[np.ndarray | None], lengths: Sequence[int], facts: ModelFacts
) -> list[np.ndarray]:
    """The arrays (tokens - 1, L, K) of rows of ``lengths`` tokens, without dense layers."""
    checked = []
    if len(arrays) != len(lengths):
        raise CaptureError(
            f"vLLM returned experts of {len(arrays)} completions, expected {len(lengths)}"
        )
    for row, (array, length) in enumerate(zip(arrays, lengths, strict=True)):
        layers = list(facts.moe_layers)
        shape = None if array is None else array.shape
        if (
            array is None
            or array.ndim != 3
            or len(array) != length - 1
            or array.shape[1] <= max(layers)
            or array.shape[2] != facts.top_k
        ):
            raise CaptureError(
                f"vLLM returned experts of shape {shape} for completion {row}, expected "
                f"({length - 1} tokens, at least {max(layers) + 1} layers, {facts.top_k}); set "
                "router.replay: old_policy"
            )
        index_NLK = array[:, layers]
        if length > 1 and (
            index_NLK.max() >= facts.num_experts
            or (facts.top_k > 1 and (index_NLK[..., 0] == index_NLK[..., 1]).any())
        ):
            raise CaptureError(
                f"vLLM returned no experts for a token and a MoE layer of completion {row}, or "
                f"more than the model's {facts.num_experts}; set router.replay: old_policy"
            )
        checked.append(index_NLK)
    return checked


def place(arrays: Sequence[np.ndarray], mask_BS: Tensor, facts: ModelFacts) -> PinnedChoice:
    """The experts of rows whose attention mask is ``mask_BS``, each array from its first token on.

    Tokens that the mask excludes and the last one of each row are missing.
    """
    sizes = len(facts.moe_layers), facts.top_k, facts.num_experts
    choice = empty_choice(mask_BS, *sizes, mask_BS.device)
    ran_BS = torch.zeros(mask_BS.shape, dtype=torch.bool)
    host_BSLK = choice.index_BSLK.cpu()
    for row, start in enumerate(mask_BS.int().argmax(dim=1).tolist()):
        part = slice(start, start + len(arrays[row]))
        host_BSLK[row, part] = torch.from_numpy(arrays[row].astype(np.int16)).to(host_BSLK.dtype)
        ran_BS[row, part] = True
    choice.index_BSLK.copy_(host_BSLK)
    return PinnedChoice(choice.index_BSLK, choice.missing_BS | ~ran_BS.to(mask_BS.device))


# -- a loss-free bias -----------------------------------------------------------------------------


def send_bias(generation: Any, biases: Callable[[], Mapping[str, Tensor]]) -> None:
    """Send a learned bias, by name of a checkpoint's tensor, to vLLM with the weights."""
    iterate = generation._iter_named_params

    def with_biases() -> Iterator[tuple[str, Tensor]]:
        yield from iterate()
        for name, bias_E in biases().items():
            yield name, bias_E.to(generation.accelerator.device)

    generation._iter_named_params = with_biases
