"""``study --plan``: the runs, their estimated cost, and the assumptions. Starts nothing.

Memory of one device, training tokens, FLOPs, hours. Parameters are counted on the meta device from
the config; no weight is read. The memory of losses, padding and evaluation are not counted.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_finetune.errors import MoeFinetuneError
from moe_finetune.experiments import folder as disk
from moe_finetune.experiments.expand import Run
from moe_finetune.experiments.recipe import PlanSection, StudyRecipe
from moe_finetune.io.tables import aligned
from moe_finetune.lora.coverage import Coverage, lora_coverage
from moe_finetune.models.structure import meta_model
from moe_finetune.recipe.method import Method
from moe_finetune.recipe.schema import Recipe
from moe_finetune.training.memory.plan import GIB, MemoryPlan, plan_memory

BYTES_PER_TOKEN = 4.0  # of English text, in the vocabularies of these models


@dataclass(frozen=True)
class Size:
    """A model as it would be trained.

    Attributes:
        parameters: total count. ``active``: those in a token's forward products (without the
            embedding, with K of E experts). ``trained``: those in the optimizer.
            ``trained_active``: trained ones that a token uses.
        attention: multiply-adds of scores and values, per token and token of context.
        memory: on one device, without sharding.
    """

    parameters: int
    active: int
    trained: int
    trained_active: int
    attention: int
    memory: MemoryPlan


@dataclass(frozen=True)
class Cost:
    """Estimates of one run; unknown ones are None, and ``unknown`` says why.

    Attributes:
        tokens: total training tokens; ``tokens_from`` is the source of that number.
        flops: total FLOPs of training.
        hours: wall clock on ``devices`` of the assumed hardware.
        memory: bytes on each device, with weights, adapter and optimizer sharded evenly.
        least_devices: the smallest number of devices that fit the run, or None if the activations
            exceed one device.
    """

    size: Size | None
    tokens: float | None
    tokens_from: str
    flops: float | None
    hours: float | None
    memory: float | None
    least_devices: int | None
    unknown: str = ""


class Estimator:
    """Estimates runs under one set of assumptions; equal models are counted once."""

    def __init__(self, assumed: PlanSection):
        self.assumed = assumed
        self._sizes: dict[str, Size | MoeFinetuneError] = {}

    def __call__(self, recipe: Recipe) -> Cost:
        tokens, source = training_tokens(recipe, self.assumed)
        size = self._size(recipe)
        if isinstance(size, MoeFinetuneError):
            return Cost(None, tokens, source, None, None, None, None, str(size).splitlines()[0])
        fixed = size.memory.fixed
        room = self.assumed.memory_gib * GIB - size.memory.activations
        least = math.ceil(fixed / room) if room > 0 else None
        memory = fixed / self.assumed.devices + size.memory.activations
        if tokens is None:
            return Cost(size, None, source, None, None, memory, least, source)
        flops = tokens * flops_per_token(size, recipe)
        speed = self.assumed.peak_tflops * 1e12 * self.assumed.utilization * self.assumed.devices
        return Cost(size, tokens, source, flops, flops / speed / 3600, memory, least)

    def _size(self, recipe: Recipe) -> Size | MoeFinetuneError:
        key = json.dumps(
            [
                recipe.model.model_dump(),
                recipe.lora and recipe.lora.model_dump(),
                recipe.router.train,
                recipe.data.max_length,
                recipe.trainer.get("per_device_train_batch_size"),
                recipe.trainer.get("gradient_checkpointing"),
                recipe.trainer.get("gradient_accumulation_steps"),
                recipe.trainer.get("optim"),
            ],
            sort_keys=True,
        )
        if key not in self._sizes:
            try:
                self._sizes[key] = model_size(recipe)
            except MoeFinetuneError as error:
                self._sizes[key] = error
        return self._sizes[key]


def model_size(recipe: Recipe) -> Size:
    """Count the recipe's model; raise CheckpointError if its config is not available."""
    import torch

    from moe_finetune.lora.targets import add_lora
    from moe_finetune.models import opened_as
    from moe_finetune.models.fresh import fresh_config
    from moe_finetune.models.loading import local_folder, open_config

    folder = local_folder(recipe.model.path, weights=False, revision=recipe.model.revision)
    fresh = recipe.model.init == "random"
    opened = fresh_config(folder, recipe.model.config) if fresh else open_config(folder)
    config, family = opened
    model = opened_as(family, meta_model(config))
    with torch.device("meta"):
        adapted = add_lora(model, recipe.lora, recipe.router.train)
    coverage = lora_coverage(adapted)
    # Without losses, so that methods share one plan.
    memory = plan_memory(adapted, recipe.model_copy(update={"method": Method(preset="none")}))
    share = family.top_k(config) / family.num_experts(config)
    text = config.get_text_config()
    tied = getattr(config, "tie_word_embeddings", False)
    embedding = 0 if tied else text.vocab_size * text.hidden_size
    parameters = coverage.total.parameters
    idle = round(coverage.groups["routed experts"].parameters * (1 - share))
    return Size(
        parameters,
        parameters - idle - embedding,
        coverage.total.trained_parameters,
        _trained_active(coverage, share, embedding if recipe.lora is None else 0),
        _attention(text),
        memory,
    )


def _trained_active(coverage: Coverage, share: float, embedding: int) -> int:
    routed = coverage.groups["routed experts"].trained_parameters
    return coverage.total.trained_parameters - round(routed * (1 - share)) - embedding


def _attention(config: Any) -> int:
    heads, value = config.num_attention_heads, getattr(config, "v_head_dim", None)
    rope = getattr(config, "qk_rope_head_dim", None)
    if rope and value:  # multi-head latent attention
        widths = rope + config.qk_nope_head_dim + value
    else:
        widths = 2 * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return int(config.num_hidden_layers * heads * widths)


def flops_per_token(size: Size, recipe: Recipe) -> float:
    """FLOPs of training on one token: forward, once more with checkpointing, and backward.

    A multiply-add is 2 FLOPs. The backward has one product with every active weight for the input's
    gradient, and one more for the gradient of each trained weight. Causal attention sees half of
    ``max_length`` on average and has no weights, so its backward costs twice its forward.
    """
    recomputed = 1 if recipe.trainer.get("gradient_checkpointing", True) else 0
    weights = 2 * (size.active * (2 + recomputed) + size.trained_active)
    return weights + size.attention * recipe.data.max_length * (3 + recomputed)


def training_tokens(recipe: Recipe, assumed: PlanSection) -> tuple[float | None, str]:
    """Number of training tokens of a run, and its source."""
    trainer = recipe.trainer
    steps = int(trainer.get("max_steps", -1))
    if steps > 0:
        rows = int(trainer.get("per_device_train_batch_size", 8))
        rows *= int(trainer.get("gradient_accumulation_steps", 1)) * assumed.devices
        return float(steps * rows * recipe.data.max_length), "max_steps of full rows"
    if assumed.tokens is not None:
        return assumed.tokens, "plan.tokens"
    size = data_bytes(recipe.data.train)
    if size is None:
        return None, "the amount of data is unknown before it is read; set plan.tokens or max_steps"
    epochs = float(trainer.get("num_train_epochs", 3))
    return size / BYTES_PER_TOKEN * epochs, "the files' bytes / 4, times the epochs"


def data_bytes(sources: Sequence[Any] | str) -> int | None:
    """Bytes of local training files; None if one is not a local file."""
    total = 0
    for source in [sources] if isinstance(sources, str) else sources:
        path = Path(str(getattr(source, "path", source))).expanduser()
        if not path.is_file():
            return None
        total += path.stat().st_size
    return total


UNKNOWN = "?"


def plan_text(study: StudyRecipe, runs: Sequence[Run], output: Path | None = None) -> str:
    """A table with one line per arm, totals, and the assumptions."""
    estimate, assumed = Estimator(study.plan), study.plan
    header = ["arm", "runs", "parameters", "trained", "GiB/device", "devices", "tokens", "hours"]
    if output is not None:
        header.append("finished")
    lines, reasons = [header], []
    estimated = total = 0.0
    for arm in dict.fromkeys(run.arm for run in runs):
        arm_runs = [run for run in runs if run.arm == arm]
        cost = estimate(arm_runs[0].recipe)
        line = [arm, str(len(arm_runs)), *_cells(cost)]
        if output is not None:
            line.append(str(sum(disk.state_of(output, run.name) == "finished" for run in arm_runs)))
        lines.append(line)
        if cost.unknown and cost.unknown not in reasons:
            reasons.append(cost.unknown)
        if cost.hours is not None:
            total += cost.hours * len(arm_runs)
            estimated += len(arm_runs)
    out = [f"{study.title or study.name}: {len(runs)} runs", aligned(lines, "left")]
    out += ["", f"{total:,.1f} h one after another, {total * assumed.devices:,.1f} device hours"]
    if estimated < len(runs):
        out[-1] += f", for the {estimated:.0f} runs whose time can be estimated"
    out += [f"{UNKNOWN}: {reason}" for reason in reasons]
    out.append(
        f"Assumed: {assumed.devices} x {assumed.hardware} ({assumed.memory_gib:g} GiB, "
        f"{assumed.peak_tflops:g} TFLOP/s at {assumed.utilization:.0%} utilization); weights and "
        "optimizer sharded evenly; 'devices' is the smallest number that fits a run. Loading, "
        "merging and evaluation are not counted. Change these with plan.KEY=VALUE."
    )
    return "\n".join(out)


def _cells(cost: Cost) -> list[str]:
    if cost.size is None or cost.memory is None:
        return [UNKNOWN] * 4 + [_count(cost.tokens), UNKNOWN]
    return [
        _count(cost.size.parameters),
        _count(cost.size.trained),
        f"{cost.memory / GIB:.1f}",
        str(cost.least_devices or "none"),
        _count(cost.tokens),
        UNKNOWN if cost.hours is None else f"{cost.hours:.2f}",
    ]


def _count(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.0f}"
