"""Branch-Train-MiX: dense models' feed-forwards become experts, everything else is averaged.

The checkpoint is written tensor by tensor from the experts' files; no model is built, and memory
stays at a few chunks per thread. Router rows are normal with standard deviation ``router_std``.
Source: BTX (arXiv 2403.07816) as used in P3 §3.2.

Shape legend: N experts, H hidden, D width of the feed-forward.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.checkpoint.small_files import CARD_FILE, carried_files, model_card
from moe_finetune.errors import CheckpointError
from moe_finetune.io import check_output, one_writer
from moe_finetune.io.checkpoint_files import INDEX, index_text
from moe_finetune.io.safetensors_header import ITEM_BYTES, Header, TensorInfo, build_header
from moe_finetune.models import FAMILIES
from moe_finetune.models.class_structure import patterns_on_disk
from moe_finetune.upcycle.dense_parents import DenseFacts
from moe_finetune.upcycle.experts import (
    FEED_FORWARD,
    Expert,
    check_alike,
    open_expert,
    tensor_names,
)

if TYPE_CHECKING:
    from torch import Tensor

    from moe_finetune.checkpoint.weight_files import Content

SHARD_BYTES = 4_000_000_000
_CHUNK = 4 << 20  # elements


@dataclass(frozen=True)
class UpcycleReport:
    """What a merge wrote: folder, the MoE's type, number of experts, bytes and wall seconds."""

    output: Path
    model_type: str
    experts: int
    averaged: int
    bytes_written: int
    seconds: float


@dataclass(frozen=True)
class Average:
    """The mean of equal-shaped stored tensors, summed in float64 (float32 for 16-bit types)."""

    sources: tuple[TensorInfo, ...]

    def __call__(self, target: TensorInfo) -> Iterator[Tensor]:
        import torch

        from moe_finetune.checkpoint.weight_files import DTYPES, read_elements

        wide = torch.float32 if ITEM_BYTES[target.dtype] == 2 else torch.float64
        size = math.prod(target.shape)
        for start in range(0, size, _CHUNK):
            count = min(_CHUNK, size - start)
            total = torch.zeros(count, dtype=wide)
            for source in self.sources:
                total += read_elements(source, start, count)
            yield (total / len(self.sources)).to(DTYPES[target.dtype])


@dataclass(frozen=True)
class RandomRows:
    """Normally distributed values from a seed."""

    std: float
    seed: int

    def __call__(self, target: TensorInfo) -> Iterator[Tensor]:
        import torch

        from moe_finetune.checkpoint.weight_files import DTYPES

        generator = torch.Generator().manual_seed(self.seed)
        values = torch.randn(target.shape, generator=generator) * self.std
        yield values.to(DTYPES[target.dtype])


@one_writer
def merge_experts(
    experts: Sequence[str | Path],
    output: str | Path,
    *,
    top_k: int = 2,
    router_std: float = 0.02,
    seed: int = 0,
    workers: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> UpcycleReport:
    """Write the MoE whose expert n is the feed-forward of ``experts[n]``.

    Llama and Mistral give a Mixtral, Qwen3 a Qwen3-MoE; a tied head becomes a separate tensor. With
    N copies of one model the MoE computes that model's function, whatever its routers select.

    Args:
        experts: dense checkpoint folders with equal shapes, type and tokenizer; tokenizer and
            generation files come from the first.
        output: folder to create.
        top_k: experts per token.
        router_std: standard deviation of the routers' weights.
        seed: of the routers.
        workers: threads; default: see
            :func:`~moe_finetune.checkpoint.weight_files.write_checkpoint`.
        shard_bytes: largest size of a weight file in bytes, unless one tensor is larger.

    Raises:
        CheckpointError: an expert is damaged, or differs from the first in tokenizer, sizes or
            tensors.
        UnsupportedModelError: no MoE exists for the model type.
        OutputExistsError, OutputBusyError, DiskSpaceError: before anything is written.
    """
    from moe_finetune.checkpoint.weight_files import write_checkpoint

    started = time.perf_counter()
    output = Path(output)
    check_output(output)
    opened = [open_expert(path) for path in experts]
    if not 1 <= top_k <= len(opened) or len(opened) < 2:
        raise CheckpointError(
            f"merge: {len(opened)} experts with top_k {top_k}; use two experts or more, and a "
            "top_k between 1 and their number"
        )
    check_alike(opened)
    contents: dict[str, Content] = {}
    shapes: list[tuple[str, str, tuple[int, ...]]] = []
    for name, dtype, shape, content in plan(opened, router_std, seed):
        contents[name] = content
        shapes.append((name, dtype, shape))
    files = shard(shapes, shard_bytes)
    small = carried_files(opened[0].folder)
    small["config.json"] = moe_config(opened[0].facts, len(opened), top_k)
    small[CARD_FILE] = _card(opened, top_k).encode()
    if len(files) > 1:
        tensors = [info for header in files.values() for info in header.tensors.values()]
        small[INDEX] = index_text(tensors).encode()
    size = write_checkpoint(output, files, contents, small, workers=workers)
    averaged = sum(isinstance(content, Average) for content in contents.values())
    seconds = time.perf_counter() - started
    return UpcycleReport(
        output=output,
        model_type=opened[0].facts.target,
        experts=len(opened),
        averaged=averaged,
        bytes_written=size,
        seconds=round(seconds, 3),
    )


def _card(experts: Sequence[Expert], top_k: int) -> str:
    """The MoE's model card, which names the first expert's base and no local folder."""
    first = experts[0].folder
    return model_card(
        first,
        f"Mixture of {len(experts)} experts",
        options={"Experts": len(experts), "Experts a token": top_k},
        origin="A mixture of the feed-forwards of {} and its siblings, everything else averaged "
        "(Branch-Train-MiX), written by moe-finetune. Its routers are random until they are "
        "trained.",
    )


def plan(
    experts: Sequence[Expert], router_std: float, seed: int
) -> Iterable[tuple[str, str, tuple[int, ...], Content]]:
    """Yield every tensor of the MoE in file order: name, dtype, shape, content."""
    from moe_finetune.checkpoint.weight_files import copy_of

    facts = experts[0].facts
    stored = names_in_files(facts, len(experts))

    def average(name: str) -> tuple[str, str, tuple[int, ...], Content]:
        info = experts[0].tensors[name]
        sources = tuple(expert.tensors[name] for expert in experts)
        return name, info.dtype, info.shape, Average(sources)

    names = tensor_names(facts)
    yield average("model.embed_tokens.weight")
    for layer in range(facts.values["num_hidden_layers"]):
        for name in names[layer]:
            if ".mlp." not in name:
                yield average(name)
        gate = experts[0].tensors[f"model.layers.{layer}.mlp.gate_proj.weight"]
        rows = RandomRows(router_std, seed * 1_000_003 + layer)
        yield stored["router"].format(layer=layer), gate.dtype, (len(experts), gate.shape[1]), rows
        for index, expert in enumerate(experts):
            for part, projection in FEED_FORWARD.items():
                info = expert.tensors[f"model.layers.{layer}.mlp.{projection}.weight"]
                name = stored[part].format(layer=layer, expert=index)
                yield name, info.dtype, info.shape, copy_of(info)
    yield average("model.norm.weight")
    yield average("lm_head.weight")


def shard(
    shapes: Sequence[tuple[str, str, tuple[int, ...]]], shard_bytes: int
) -> dict[str, Header]:
    """Headers of the weight files of at most ``shard_bytes``, or of one larger tensor."""
    from huggingface_hub.serialization import split_state_dict_into_shards_factory

    entries = {entry[0]: entry for entry in shapes}
    split = split_state_dict_into_shards_factory(
        entries,
        get_storage_size=lambda entry: ITEM_BYTES[entry[1]] * math.prod(entry[2]),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    return {
        file: build_header(Path(file), [entries[name] for name in names])
        for file, names in split.filename_to_tensors.items()
    }


def names_in_files(facts: DenseFacts, experts: int) -> dict[str, str]:
    """What transformers calls a layer's router and matrices: by part, with layer and expert."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = json.loads(moe_config(facts, experts, 1))
    places = FAMILIES[facts.target].places(CONFIG_MAPPING[facts.target].from_dict(config))
    layer = f"{places.backbone}.layers.0."
    gate_up, down = (f"{layer}{target}" for target in places.expert_targets)
    (router,) = patterns_on_disk(config, layer + places.router_target)
    matrices = [*patterns_on_disk(config, gate_up), *patterns_on_disk(config, down)]
    return {"router": router, **dict(zip(FEED_FORWARD, matrices, strict=True))}


def moe_config(facts: DenseFacts, experts: int, top_k: int) -> bytes:
    """``config.json`` of the MoE."""
    from transformers import MixtralConfig, Qwen3MoeConfig

    values: dict[str, Any] = {
        **facts.values,
        "num_experts_per_tok": top_k,
        "tie_word_embeddings": False,
        "dtype": facts.dtype,
    }
    config: Any
    if facts.target == "mixtral":
        config = MixtralConfig(**values, num_local_experts=experts)
    else:
        config = Qwen3MoeConfig(
            **values,
            num_experts=experts,
            moe_intermediate_size=values["intermediate_size"],
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            use_sliding_window=False,
        )
    config.architectures = [FAMILIES[facts.target].class_name]
    content = json.loads(config.to_json_string())
    if facts.target == "qwen3_moe":  # transformers writes its attribute's name; readers expect this
        content["num_experts"] = content.pop("num_local_experts")
    return (json.dumps(content, indent=2) + "\n").encode()
