"""Facts about a checkpoint, what a recipe would train in it, and the memory needed."""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.errors import CheckpointError
from moe_finetune.lora.coverage import Coverage, lora_coverage
from moe_finetune.models import opened_as
from moe_finetune.models.class_structure import meta_model
from moe_finetune.models.family_lookup import MOE_OF

if TYPE_CHECKING:
    from moe_finetune.checkpoint.dense_checkpoint import DenseCheckpoint
    from moe_finetune.checkpoint.open import Checkpoint
    from moe_finetune.recipe.schema import Recipe
    from moe_finetune.training.memory.plan import MemoryPlan


_SHARED_COUNTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")


@dataclass
class Inspection:
    """Facts about one checkpoint, for a recipe and the GiB of one GPU, if given.

    ``untrained``: tensors and bytes of each part of the files that is not loaded; ``own_head``:
    whether the head is another matrix than the embedding that config.json ties it to.
    """

    path: str
    family: str
    title: str
    model_type: str
    score: str
    renormalized: bool
    scaling: float
    layers: int
    moe_layers: list[int]
    experts: int
    top_k: int
    shared_experts: int
    hidden: int
    expert_width: int
    vocabulary: int
    parameters: int
    active_parameters: int
    stored_bytes: int | None
    stored_tensors: int | None
    stored_dtypes: list[str]
    untrained: dict[str, tuple[int, int]] = field(default_factory=dict)
    own_head: bool = False
    coverage: Coverage = field(default_factory=Coverage)
    memory: MemoryPlan | None = None
    gpu: float | None = None

    @property
    def fits(self) -> bool | None:
        """Whether the recipe fits the GPU, or may, within the plan's error; None without one."""
        return (
            None if self.memory is None or self.gpu is None else not self.memory.exceeds(self.gpu)
        )

    def to_mapping(self) -> dict[str, Any]:
        plain = asdict(self) | {"coverage": self.coverage.to_mapping(), "fits": self.fits}
        if self.memory is not None:
            plain["memory"] = self.memory.to_mapping()
        return plain

    def text(self) -> str:
        lines = [
            f"{self.path}: {self.model_type}, the architecture of {self.title}",
            f"parameters     {self.parameters:,}, {self.active_parameters:,} active per token",
            f"layers         {self.layers}, MoE in {_ranges(self.moe_layers)}",
            f"experts        {self.experts} routed, {self.shared_experts} shared, "
            f"{self.top_k} selected per token",
            f"router         {self.score}, "
            f"{'renormalized' if self.renormalized else 'not renormalized'}, "
            f"scaled by {self.scaling:g}",
            f"sizes          hidden {self.hidden}, expert {self.expert_width}, "
            f"vocabulary {self.vocabulary:,}",
        ]
        lines += _on_disk(self)
        if (self.stored_tensors or 0) > self.coverage.total.tensors:
            lines[-1] += ", a tensor per expert; the table counts a layer's experts as one stack"
        if self.own_head:
            lines.append("head           of its own in the files, although config.json ties it")
        for part, (count, size) in self.untrained.items():
            tensors = "1 tensor" if count == 1 else f"{count} tensors"
            lines.append(f"not trained    {tensors} of {part} ({size / 2**30:.2f} GiB)")
        lines += ["", self.coverage.table()]
        if not self.coverage.total.reached_parameters:
            lines.append("to see what a recipe trains and its memory, add --recipe my.yaml")
        if self.memory is not None:
            lines += ["", *self.memory.lines()]
            if self.gpu is not None:
                lines += ["", self.memory.verdict(self.gpu)]
        return "\n".join(lines)


@dataclass
class DenseInspection:
    """Facts about a dense checkpoint, which trains nothing here."""

    path: str
    model_type: str
    layers: int
    hidden: int
    vocabulary: int
    parameters: int
    stored_bytes: int | None
    stored_tensors: int | None
    stored_dtypes: list[str]
    fits: None = None

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        return "\n".join([
            f"{self.path}: {self.model_type}, a dense model: no routers and no experts",
            f"parameters     {self.parameters:,}",
            f"sizes          {self.layers} layers, hidden {self.hidden}, "
            f"vocabulary {self.vocabulary:,}",
            *_on_disk(self),
            "",
            "`moe-finetune eval` compares it with a MoE"
            + (", and `upcycle` makes a MoE of it" if self.model_type in MOE_OF else ""),
        ])  # fmt: skip


def inspect_dense(source: str) -> DenseInspection | None:
    """Describe a dense checkpoint, by its headers; None if ``source`` is not one."""
    from moe_finetune.checkpoint.dense_checkpoint import is_dense, open_dense
    from moe_finetune.models.config_and_tokenizer import local_folder, parse_config

    is_local = Path(source).exists()
    if not is_local and source.startswith((".", "/", "~")):
        return None  # inspect_checkpoint refuses it
    folder = local_folder(source, weights=False)
    if not is_dense(folder):
        return None
    checkpoint = open_dense(folder) if is_local else None
    config = parse_config(folder)
    return DenseInspection(
        path=source,
        model_type=config.model_type,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        parameters=sum(parameter.numel() for parameter in meta_model(config).parameters()),
        **_in_files(checkpoint),
    )


def inspect_checkpoint(
    source: str | Checkpoint, recipe: Recipe | None = None, gpu: float | None = None, gpus: int = 1
) -> Inspection:
    """Describe a checkpoint folder, hub id or opened checkpoint, and what ``recipe`` would train.

    ``gpu``: GiB of one GPU; ``gpus``: how many share the weights by FSDP2.
    """
    from moe_finetune.models.config_and_tokenizer import open_config

    memory = None
    checkpoint = _opened(source)
    if checkpoint is None:
        config, family = open_config(str(source))
    else:
        config, family = copy.deepcopy(checkpoint.model_config), checkpoint.family
    model = opened_as(family, meta_model(config))
    coverage = coverage_of_all = lora_coverage(model, trains=False)
    if recipe is not None:
        import torch

        # PEFT takes longer to import than headers take to read.
        from moe_finetune.lora.targets import add_lora
        from moe_finetune.training.memory.plan import plan_model

        with torch.device("meta"):
            adapted = add_lora(model, recipe.lora, recipe.router.train, recipe.router.layers)
        coverage = lora_coverage(adapted)
        memory = plan_model(adapted, recipe, "cuda", gpus)
    text = config.get_text_config()
    places, top_k = family.places(config), family.top_k(config)
    experts = places.num_experts
    routed = coverage_of_all.groups["routed experts"].parameters
    own_head = 0 if checkpoint is None else _parameters_of_own_head(checkpoint)
    parameters = coverage_of_all.total.parameters + own_head
    return Inspection(
        path=str(source if checkpoint is None else checkpoint.folder),
        family=family.name,
        title=family.title,
        model_type=family.model_type,
        score=family.score,
        renormalized=family.renormalize(config),
        scaling=family.scaling(config),
        layers=text.num_hidden_layers,
        moe_layers=list(places.moe_layers),
        experts=experts,
        top_k=top_k,
        shared_experts=_shared_experts(text) if places.shared else 0,
        hidden=text.hidden_size,
        expert_width=places.expert_width,
        vocabulary=text.vocab_size,
        parameters=parameters,
        active_parameters=parameters - routed + routed * top_k // experts,
        coverage=coverage,
        memory=memory,
        gpu=gpu,
        untrained={} if checkpoint is None else checkpoint.parts_left_out(),
        own_head=bool(own_head),
        **_in_files(checkpoint),
    )


def _opened(source: str | Checkpoint) -> Checkpoint | None:
    """The opened checkpoint; None for a hub id, whose weights are not downloaded."""
    from moe_finetune.checkpoint.open import open_checkpoint

    if isinstance(source, str) and not Path(source).exists():
        if source.startswith((".", "/", "~")):
            raise CheckpointError(f"there is no checkpoint folder {source}")
        return None
    return open_checkpoint(source, stored=True)


def _shared_experts(text: Any) -> int:
    """The number that the config states; classes without such a key have one, of its own width."""
    values = (getattr(text, name, None) for name in _SHARED_COUNTS)
    return next((int(value) for value in values if isinstance(value, int)), 1)


def _parameters_of_own_head(checkpoint: Checkpoint) -> int:
    """Size of a head that config.json ties to the embedding and that is another matrix in the
    files; transformers 5 and vLLM load it."""
    from moe_finetune.checkpoint.weight_files import digest  # needs torch

    names, count = checkpoint.names, 0
    for head, embedding in names.tied.items():
        stored = [checkpoint.tensors[n] for n in names.files.get(head, ())]
        others = [checkpoint.tensors[n] for n in names.files.get(embedding, ())]
        if stored and others and digest(stored[0]) != digest(others[0]):
            count += math.prod(stored[0].shape)
    return count


def _in_files(checkpoint: Checkpoint | DenseCheckpoint | None) -> dict[str, Any]:
    if checkpoint is None:
        return {"stored_bytes": None, "stored_tensors": None, "stored_dtypes": []}
    headers = checkpoint.files.values()
    in_files = [info for header in headers for info in header.tensors.values()]
    return {
        "stored_bytes": sum(header.data_bytes for header in headers),
        "stored_tensors": len(in_files),
        "stored_dtypes": sorted({info.dtype for info in in_files}),
    }


def _on_disk(inspection: Inspection | DenseInspection) -> list[str]:
    if inspection.stored_bytes is None:
        return []
    return [
        f"on disk        {inspection.stored_bytes / 2**30:.2f} GiB in "
        f"{inspection.stored_tensors} tensors ({', '.join(inspection.stored_dtypes)})"
    ]


def _ranges(numbers: list[int]) -> str:
    """``[1, 2, 3, 7]`` -> ``1-3, 7``."""
    parts: list[list[int]] = []
    for layer in numbers:
        if parts and layer == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], layer]
        else:
            parts.append([layer])
    return ", ".join("-".join(map(str, part)) for part in parts)
