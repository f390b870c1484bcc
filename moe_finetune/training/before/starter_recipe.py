"""``moe-finetune init``: a starter recipe for the user's checkpoint and data."""

import itertools
import math
import textwrap
from bisect import bisect_left
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from typing import Any

import torch
import yaml

from moe_finetune.data.preference_and_prompt_rows import FIELDS, StageFormer
from moe_finetune.data.sources import SourceReader, read_rows
from moe_finetune.errors import RecipeError, did_you_mean
from moe_finetune.evaluation.suites import load_suite
from moe_finetune.io.atomic import refuse_existing, write_new
from moe_finetune.io.terminal import terminal
from moe_finetune.losses.presets import PRESETS
from moe_finetune.models.loading import open_config
from moe_finetune.recipe.data import DataSection, DataSource
from moe_finetune.recipe.method import WEIGHTED, resolve_method
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.stages import STAGES, STARTERS
from moe_finetune.recipe.yaml_tree import Tree
from moe_finetune.training.memory.plan import (
    GIB,
    MemoryPlan,
    machine_bytes,
    plan_recipe,
)
from moe_finetune.training.memory.step_bytes import Device

SMALL = 1 << 20
"""Hidden size x experts x MoE layers below which float32 is cheap enough to be the default."""


Change = tuple[dict[str, Any], str]
Line = tuple[str, Any, str]
"""A key of the recipe, its value, and the reason."""

GROUP = 8
"""Completions of a prompt in a starter for rewards."""
FEW_STEPS = 100
"""Below which a starter says that a run hardly changes a model."""


@dataclass(frozen=True)
class Answers:
    """The inputs of a starter recipe: the options of ``init``."""

    checkpoint: str
    data: str
    validation: str | None = None
    method: str | None = None
    suite: str | None = None
    stage: str = "sft"

    @property
    def preset(self) -> str:
        return self.method or STARTERS[self.stage]


# Changes of a starter's values that make a step smaller, with their reasons.
_CHECKPOINTING = (
    {"trainer.gradient_checkpointing": True},
    "activations are computed twice instead of kept",
)
_EVALUATED = "trainer.per_device_eval_batch_size"
_ONE_ROW = "trainer.per_device_train_batch_size", "trainer.gradient_accumulation_steps"
_AUTO_RANK = (
    {"lora.parts.experts.rank": "auto"},
    "rank / experts a token, at least 4: smaller factors",
)
_SHORTER = (
    {"data.max_length": 512, "data.overlong": "drop"},
    "longer rows are left out; 'moe-finetune preview' counts them",
)
_SHORTER_COMPLETIONS = (
    {"data.max_length": 768, "trainer.max_completion_length": 256},
    "longer prompts are left out, longer completions are cut",
)
_OFFLOADED = ({"model.offload": "experts"}, "frozen experts wait in the host's memory")
_QUANTIZED = ({"model.quantization": "nf4"}, "frozen weights in 4 bits")


def describe(checkpoint: str) -> tuple[str, Any, Any]:
    """Return a sentence that describes the checkpoint, its family and its config."""
    config, family = open_config(checkpoint)
    places = family.places(config)
    summary = (
        f"{config.model_type}, the architecture of {family.title}: "
        f"{len(places.moe_layers)} MoE layers, {places.num_experts} routed experts, "
        f"{family.top_k(config)} per token, router {family.score}"
    )
    return summary, family, config


def starter(answers: Answers, changes: Sequence[Line] = (), gpu: float | None = None) -> str:
    """The recipe as YAML, with a reason for every line.

    ``changes``: values with which a step fits; ``gpu``: GiB of the GPU it is for, or this
    machine's.
    """
    check_method(answers.preset)
    summary, family, config = describe(answers.checkpoint)
    text = config.get_text_config()
    small = text.hidden_size * family.places(text).num_experts * text.num_hidden_layers < SMALL
    preset, stage = PRESETS[answers.preset], STAGES[answers.stage]
    # Of preferences, both answers are in a batch; of prompts, a group of completions.
    rows = {"dpo": 2, "grpo": GROUP}.get(answers.stage, 4)
    step = 8 * GROUP if answers.stage == "grpo" else 32
    dtype = ("float32", "small enough") if small else ("bfloat16", "losses are in float32")
    lines: list[Line] = []
    if answers.stage != "sft":
        lines.append(("stage", answers.stage, f"TRL's {stage.trainer}"))
    lines += [
        ("model.path", answers.checkpoint, summary),
        ("model.dtype", *dtype),
        ("method.preset", preset.name, f"should show: {preset.shows}"),
    ]
    if preset.recommended and answers.stage == "sft":
        why = "measured, see docs/methods.md; a number is each loss's share; left out: the paper's"
        lines.append(("method.share", "recommended", why))
    elif not set(preset.terms) <= set(WEIGHTED):
        why = "each loss's gradient over that of the trainer's loss; left out: the paper's weights"
        lines.append(("method.share", 0.1, why))
    routers = ("frozen", "no loss of the method trains routers")
    if resolve_method(preset.name).trains_routers:
        routers = ("full", "losses on routers need it; vLLM serves the merged model")
    lines += [
        ("lora.rank", 16, "of attention and experts: lora.targets"),
        ("lora.alpha", 64, "alpha / rank scales the adapter; 4 here, 1 to 2 in PEFT and axolotl"),
        ("router.train", *routers),
        ("data.train", answers.data, layout(answers.data, answers.stage)),
    ]
    if answers.validation is not None:
        lines.append(("data.validation", answers.validation, "measured before, during and after"))
    lines.append(("data.max_length", 2048, "tokens; 'moe-finetune preview' shows what rows become"))
    if answers.stage == "grpo":
        lines.append(("rewards", [_reward(answers.data)], "1 for a right completion, else 0"))
    lines += [
        ("trainer.num_train_epochs", 1, _steps(answers, step, stage.config)),
    ]
    if answers.stage == "grpo":
        lines += [
            ("trainer.num_generations", GROUP, "completions of a prompt, compared with each other"),
            ("trainer.max_completion_length", 512, "tokens; data.max_length has prompt and answer"),
            ("trainer.learning_rate", 1e-5, "a tenth of what LoRA takes for sft"),
        ]
    elif answers.stage == "dpo":
        lines += [
            ("trainer.learning_rate", 1e-5, "a tenth of what LoRA takes for sft"),
            ("trainer.beta", 0.1, "how much the model may leave its reference; smaller: more"),
        ]
    else:
        lines.append(("trainer.learning_rate", 1e-4, "usual for LoRA; 2e-4 for few rows"))
    lines += [
        ("trainer.per_device_train_batch_size", rows, "more if the memory has room"),
        ("trainer.gradient_accumulation_steps", step // rows, f"{step} rows a step on one device"),
        ("trainer.seed", 42, "of the adapter, the order of rows and dropout"),
    ]
    if answers.validation is not None:
        lines.append((_EVALUATED, rows, "of data.validation at once; left out: 8"))
    if answers.suite is not None:
        lines.append(
            ("evaluation.suite", answers.suite, "the tuned model is scored, then its base")
        )
    for key, value, why in changes:
        position = next((i for i, line in enumerate(lines) if line[0] == key), None)
        size = f"{gpu or machine_bytes() / GIB:.3g} GiB: {why}"
        if position is None:
            section = key.split(".")[0]
            position = max(i for i, line in enumerate(lines) if line[0].startswith(section))
            lines.insert(position + 1, (key, value, size))
        else:
            lines[position] = (key, value, size)
    return _written(lines)


def _steps(answers: Answers, step: int, config: str) -> str:
    """How many steps an epoch is if they are few, else what else the section takes."""
    size = 8 if answers.stage == "grpo" else step
    rows = sum(1 for _ in itertools.islice(read_rows(answers.data), FEW_STEPS * size))
    steps = math.ceil(rows / size)
    if steps >= FEW_STEPS:
        return f"trainer takes any field of TRL's {config}"
    return (
        f"{steps} step{'s' * (steps > 1)} of these {rows} rows, which change little; more epochs do"
    )


def _reward(data: str) -> str:
    """The reward that reads a field of the first row."""
    _, row = next(iter(read_rows(data)))
    return "code" if "tests" in row else "exact_match"


def _written(lines: Sequence[Line]) -> str:
    """Lines of YAML by section, each with its reason after it, or above it where it is long."""
    text: list[str] = []
    above: list[str] = []
    for key, value, why in lines:
        *sections, name = key.split(".")
        same = 0
        while same < min(len(sections), len(above)) and sections[same] == above[same]:
            same += 1
        if not same and text:
            text.append("")
        for depth in range(same, len(sections)):
            text.append(f"{'  ' * depth}{sections[depth]}:")
        above = sections
        indent = "  " * len(sections)
        flow = isinstance(value, list)
        text_of = yaml.safe_dump(value if flow else {name: value}, width=1000, allow_unicode=True,
                                 default_flow_style=flow).strip()  # fmt: skip
        line = indent + (f"{name}: {text_of}" if flow else text_of)
        if len(line) <= 36 and len(why) <= 64:
            text.append(f"{line:<36}  # {why}")
        else:
            text += [*(f"{indent}# {part}" for part in textwrap.wrap(why, 92)), line]
    return "\n".join(text) + "\n"


def memory_changes(values: dict[str, Any], gpu: float | None = None) -> tuple[list[Line], bool]:
    """Changes, the least costly first, with which a step of a recipe fits, and whether it does."""
    config, _ = open_config(values["model"]["path"])
    size = gpu or machine_bytes() / GIB
    device: Device = "cuda" if gpu or torch.cuda.is_available() else "cpu"

    @cache
    def plan(count: int) -> MemoryPlan:
        changed = reduce(_with, (change for change, _ in steps[:count]), values)
        return plan_recipe(config, recipe_from_tree(Tree(changed)), device)

    # TRL recomputes activations on a GPU by default; only a GPU has a host to offload to.
    trainer, steps = values["trainer"], list[Change]()
    fits_at_rest = plan(0).stored.fixed < plan(0).room(size)
    rows = trainer["per_device_train_batch_size"] * trainer["gradient_accumulation_steps"]
    one_row: dict[str, Any] = dict(zip(_ONE_ROW, (1, rows), strict=True))
    if _EVALUATED.split(".")[1] in trainer and values.get("stage") != "grpo":
        one_row[_EVALUATED] = 1
    smaller: list[Change] = [
        (one_row, "one row at a time, as many rows a step"),
        _AUTO_RANK,
        _SHORTER_COMPLETIONS if values.get("stage") == "grpo" else _SHORTER,
    ]
    smaller = [_CHECKPOINTING, *smaller] if device == "cpu" else [*smaller, _OFFLOADED]
    steps += [*smaller, _QUANTIZED] if fits_at_rest else [_QUANTIZED, *smaller]
    first = int(not fits_at_rest)
    count = bisect_left(range(first, len(steps)), True, key=lambda n: plan(n).fits(size)) + first
    changes = [(key, value, why) for change, why in steps[:count] for key, value in change.items()]
    return changes, plan(count).fits(size)


def _with(recipe: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """``recipe`` with other values, by dotted key."""
    recipe = deepcopy(recipe)
    for key, value in values.items():
        *sections, name = key.split(".")
        inner = recipe
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return recipe


def check_method(name: str) -> None:
    """Refuse a preset that does not exist."""
    if name not in PRESETS:
        raise RecipeError(f"--method {name}: unknown{did_you_mean(name, PRESETS)}")


def layout(source: str, stage: str = "sft") -> str:
    """The detected layout of the first row of ``source``."""
    if stage != "sft":
        former: Any = StageFormer(STAGES[stage])
        next(iter(SourceReader(DataSource(path=source), DataSection(train=source), 0, former)))
        return ", ".join(FIELDS[STAGES[stage].form])
    reader = SourceReader(DataSource(path=source), DataSection(train=source))
    next(iter(reader))
    return reader.former.detected


def write_starter(answers: Answers, output: Path, gpu: float | None = None) -> str:
    """Write the recipe to a new file if a run would accept it; return what does not fit, or ""."""
    refuse_existing(output)
    values = yaml.safe_load(starter(answers))
    recipe = recipe_from_tree(Tree(values))
    if recipe.evaluation is not None:
        load_suite(recipe.evaluation.suite)
    with terminal().announced("init"):
        changes, fits = memory_changes(values, gpu)
    write_new(output, starter(answers, changes, gpu))
    size = f"{gpu or machine_bytes() / GIB:.3g} GiB"
    return "" if fits else f"a step does not fit {size} with it; docs/memory.md has what else helps"
