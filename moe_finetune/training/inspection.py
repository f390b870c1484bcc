"""What a checkpoint is, what a recipe would train in it, and the memory that takes.

Everything is computed on the meta device and from file headers; no weight is read.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.errors import CheckpointError
from moe_finetune.lora.coverage import Coverage, lora_coverage
from moe_finetune.models import Family, family_of

if TYPE_CHECKING:
    from torch import nn

    from moe_finetune.recipe.schema import Recipe

GIB = 2**30
ADAM_BYTES = 12  # float32 gradient and two moments, per trained parameter


@dataclass
class Memory:
    """Bytes that training holds on one device, without sharding; activations are an estimate.

    Attributes:
        weights: the model in its training dtype.
        adapter: what training adds: LoRA factors and copies of full routers, float32.
        optimizer: gradients and AdamW's moments of what is trained, float32.
        activations: of one micro-batch at the recipe's batch size and length.
        tokens: tokens of that micro-batch.
        device: bytes of the first GPU, or None.
    """

    weights: int
    adapter: int
    optimizer: int
    activations: int
    tokens: int
    device: int | None = None

    @property
    def total(self) -> int:
        """Sum of the four parts."""
        return self.weights + self.adapter + self.optimizer + self.activations


@dataclass
class Inspection:
    """Facts of one checkpoint; ``coverage`` and ``memory`` are those of the recipe, if given."""

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
    coverage: Coverage = field(default_factory=Coverage)
    memory: Memory | None = None

    def to_mapping(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = asdict(self) | {"coverage": self.coverage.to_mapping()}
        if self.memory is not None:
            plain["memory"] = asdict(self.memory) | {"total": self.memory.total}
        return plain

    def text(self) -> str:
        """The facts for a reader."""
        lines = [
            f"{self.path}: {self.title} ({self.model_type}, family {self.family})",
            f"parameters     {self.parameters:,}, {self.active_parameters:,} active per token",
            f"layers         {self.layers}, MoE in {_ranges(self.moe_layers)}",
            f"experts        {self.experts} routed, {self.shared_experts} shared, "
            f"{self.top_k} selected per token",
            f"router         {self.score}, "
            f"{'renormalised' if self.renormalized else 'not renormalised'}, "
            f"scaled by {self.scaling:g}",
            f"sizes          hidden {self.hidden}, expert {self.expert_width}, "
            f"vocabulary {self.vocabulary:,}",
        ]
        if self.stored_bytes is not None:
            lines.append(
                f"on disk        {self.stored_bytes / GIB:.2f} GiB in {self.stored_tensors} tensors"
                f" ({', '.join(self.stored_dtypes)})"
            )
        lines += ["", self.coverage.table()]
        if self.memory is not None:
            lines += ["", *memory_lines(self.memory)]
        return "\n".join(lines)


def inspect_checkpoint(path: str, recipe: Recipe | None = None) -> Inspection:
    """Describe a checkpoint folder or hub id, and what ``recipe`` would do with it.

    Raises:
        CheckpointError: a folder that is incomplete or damaged, by its headers.
        UnsupportedModelError: no family has its ``model_type``.
        RecipeError: the recipe's LoRA targets match nothing.
    """
    import torch

    from moe_finetune.models.loading import load_config

    stored = _stored(path)
    config = load_config(path)
    family = family_of(config)
    model = meta_model(config)
    plain = lora_coverage(model)
    parameters = plain.total.parameters
    moe_layers = family.moe_layers(config)
    experts, top_k = family.num_experts(config), family.top_k(config)
    routed = plain.groups["routed experts"].parameters
    coverage, memory = plain, None
    if recipe is not None:
        from moe_finetune.lora.targets import add_lora

        with torch.device("meta"):
            coverage = lora_coverage(add_lora(model, recipe.lora, recipe.router.train))
        memory = estimate_memory(config, family, coverage, recipe)
    else:
        for group in coverage.groups.values():
            group.reached_tensors = group.reached_parameters = 0
            group.trained_tensors = group.trained_parameters = 0
    return Inspection(
        path=path,
        family=family.name,
        title=family.title,
        model_type=family.model_type,
        score=family.score,
        renormalized=family.renormalize(config),
        scaling=family.scaling(config),
        layers=config.num_hidden_layers,
        moe_layers=moe_layers,
        experts=experts,
        top_k=top_k,
        shared_experts=(getattr(config, "n_shared_experts", 0) or 0)
        if family.shared_targets
        else 0,
        hidden=config.hidden_size,
        expert_width=family.expert_width(config),
        vocabulary=config.vocab_size,
        parameters=parameters,
        active_parameters=parameters - routed + routed * top_k // experts,
        coverage=coverage,
        memory=memory,
        **stored,
    )


def meta_model(config: Any, attn_implementation: str | None = None) -> nn.Module:
    """The model of ``config`` on the meta device: names and shapes, no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attn_implementation
        )


def estimate_memory(config: Any, family: Family, coverage: Coverage, recipe: Recipe) -> Memory:
    """Training memory on one device.

    Activations: with gradient checkpointing (TRL's default) each layer keeps its input, and one
    layer at a time is recomputed; without it every layer keeps what one layer needs. A layer needs
    about ten hidden-sized tensors a token, and per selected expert one input and output (H) and
    three expert-sized tensors (D).
    """
    import torch

    item = 2 if recipe.model.dtype == "bfloat16" else 4
    total = coverage.total
    added = 0 if recipe.lora is None else total.trained_parameters
    tokens = int(recipe.trainer.get("per_device_train_batch_size", 8)) * recipe.data.max_length
    hidden, width, top_k = config.hidden_size, family.expert_width(config), family.top_k(config)
    one_layer = tokens * (10 * hidden + top_k * (2 * hidden + 3 * width)) * item
    if recipe.trainer.get("gradient_checkpointing", True):
        activations = tokens * hidden * item * config.num_hidden_layers + one_layer
    else:
        activations = one_layer * config.num_hidden_layers
    device = None
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0).total_memory
    return Memory(
        # A model that trains as a whole is float32, see ``start_model``.
        weights=total.parameters * (4 if recipe.lora is None else item),
        adapter=added * 4,
        optimizer=total.trained_parameters * ADAM_BYTES,
        activations=activations,
        tokens=tokens,
        device=device,
    )


def _stored(path: str) -> dict[str, Any]:
    """What the headers of a local folder say; nothing for a hub id."""
    from moe_finetune.checkpoint.opened import open_checkpoint

    if not Path(path).exists():
        if path.startswith((".", "/", "~")):
            raise CheckpointError(f"there is no checkpoint folder {path}")
        return {"stored_bytes": None, "stored_tensors": None, "stored_dtypes": []}
    checkpoint = open_checkpoint(path, stored=True)
    in_files = [info for header in checkpoint.files.values() for info in header.tensors.values()]
    return {
        "stored_bytes": checkpoint.size,
        "stored_tensors": len(in_files),
        "stored_dtypes": sorted({info.dtype for info in in_files}),
    }


def _ranges(numbers: list[int]) -> str:
    """``[1, 2, 3, 7]`` -> ``1-3, 7``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


def memory_lines(memory: Memory) -> list[str]:
    """The plan as a table for a reader."""
    lines = [f"memory for training on one device, micro-batch of {memory.tokens:,} tokens:"]
    for name in ("weights", "adapter", "optimizer", "activations"):
        rough = " (rough)" if name == "activations" else ""
        lines.append(f"  {name:<12} {getattr(memory, name) / GIB:8.2f} GiB{rough}")
    lines.append(f"  {'total':<12} {memory.total / GIB:8.2f} GiB")
    if memory.device is not None:
        fits = "fits" if memory.total < memory.device else "does not fit: shard it or shrink it"
        lines.append(f"  {'this GPU':<12} {memory.device / GIB:8.2f} GiB, {fits}")
    return lines
