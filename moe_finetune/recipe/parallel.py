"""The section ``parallel``: what the processes of one run share, and what that does not go with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator

from moe_finetune.recipe.section import Section


class ParallelSection(Section):
    """What the processes that a launcher starts share; each has batches of its own all the same."""

    experts: int | Literal["all"] = Field(
        default=1,
        description="ranks that hold the routed experts together, each its part; `all` of them",
    )

    @field_validator("experts")
    @classmethod
    def _some(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"must be 1 or more, or 'all', not {value}")
        return value


def unspreadable(recipe: Any) -> Iterator[str]:
    """Why the experts of this run cannot be spread over ranks.

    Args:
        recipe: with a ``parallel.experts`` that is not 1.
    """
    key, lora, model = f"parallel.experts: {recipe.parallel.experts}", recipe.lora, recipe.model
    if lora is None or not (lora.targets or recipe.router.train != "full"):
        yield (
            f"{key} needs an adapter: the experts stay frozen on their ranks; give a `lora:` "
            "section with a rank and targets, or train all weights by FSDP2 "
            "(recipes/hardware/fsdp2_8gpu.yaml)"
        )
    if model.quantization != "none":
        yield (
            f"{key} does not go with model.quantization '{model.quantization}', whose weights "
            "cannot be divided; set one of them to its default"
        )
    if model.offload != "none":
        yield (
            f"{key} does not go with model.offload '{model.offload}'; spread experts take less of "
            "each GPU already; set one of them to its default"
        )
    for name in ("torch_compile", "fsdp", "deepspeed", "use_vllm"):
        if recipe.trainer.get(name):
            yield f"trainer.{name}: does not go with {key}; leave one of them out"
