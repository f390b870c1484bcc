"""``moe-finetune init``: a starter recipe for the user's checkpoint and data."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from moe_finetune.data.readers import SourceReader
from moe_finetune.data.stage_form import FIELDS, StageFormer
from moe_finetune.errors import RecipeError, UnsupportedModelError, did_you_mean
from moe_finetune.evaluation.suites import load_suite
from moe_finetune.io.atomic import refuse_existing, write_new
from moe_finetune.io.terminal import terminal
from moe_finetune.losses.presets import PRESETS
from moe_finetune.models.loading import open_config
from moe_finetune.recipe.data import DataSection, DataSource
from moe_finetune.recipe.dropped import VALUES
from moe_finetune.recipe.method import WEIGHTED
from moe_finetune.recipe.schema import Recipe, recipe_from_tree
from moe_finetune.recipe.stages import STAGES
from moe_finetune.recipe.tree import Tree
from moe_finetune.training.memory.plan import (
    Device,
    adapted_meta,
    fixed_bytes,
    plainly_fits,
    plan_recipe,
)
from moe_finetune.training.memory.stored import GIB
from moe_finetune.training.plan import machine_bytes, machine_room

SMALL = 1 << 20
"""Hidden size x experts x MoE layers below which float32 is cheap enough to be the default."""


METHODS = {"sft": "orthogonal_variance", "dpo": "aux_loss"}
"""Stages that a starter is written for, and the default method of each."""


@dataclass(frozen=True)
class Answers:
    """The inputs of a starter recipe.

    Attributes:
        checkpoint: folder or hub id.
        data: training rows: file, folder or hub id.
        validation: validation rows, or None.
        method: a preset's name; None for the stage's default.
        suite: evaluation suite, or None.
        stage: sft, or dpo for rows of preferences.
    """

    checkpoint: str
    data: str
    validation: str | None = None
    method: str | None = None
    suite: str | None = None
    stage: str = "sft"

    @property
    def preset(self) -> str:
        return self.method or METHODS[self.stage]


_SMALLER: tuple[tuple[str, dict[str, Any]], ...] = (
    ("trainer", {"gradient_checkpointing": True}),
    ("trainer", {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 32}),
    ("model", {"quantization": "nf4"}),
    ("data", {"max_length": 512}),
)
"""Changes of a starter's values that need less memory, in the order of docs/memory.md."""


def describe(checkpoint: str) -> tuple[str, Any, Any]:
    """Return a sentence that describes the checkpoint, its family and its config.

    Raises:
        CheckpointError: no such checkpoint.
        UnsupportedModelError: no family supports its ``model_type``.
    """
    config, family = open_config(checkpoint)
    layers = family.moe_layers(config)
    summary = (
        f"{config.model_type}, the architecture of {family.title}: {len(layers)} MoE layers, "
        f"{family.num_experts(config)} routed experts, {family.top_k(config)} per token, "
        f"router {family.score}"
    )
    return summary, family, config


def starter(answers: Answers, changes: Sequence[str] = ()) -> str:
    """The recipe as YAML with comments.

    Args:
        changes: keys to change so that a step fits this machine, as :func:`memory_changes`
            returns them.

    Raises:
        RecipeError: an unknown method.
        DataError: the rows cannot be read, or their layout is unknown.
    """
    if answers.stage not in METHODS:
        raise RecipeError(
            f"--stage {answers.stage}: "
            + VALUES["stage"].get(
                answers.stage,
                f"init writes recipes for {' and '.join(METHODS)}; recipes/stages has others",
            )
        )
    check_method(answers.preset)
    summary, family, config = describe(answers.checkpoint)
    text = config.get_text_config()
    small = text.hidden_size * family.num_experts(text) * text.num_hidden_layers < SMALL
    data: dict[str, Any] = {"train": answers.data}
    if answers.validation is not None:
        data["validation"] = answers.validation
    data["max_length"] = 2048
    sections = {
        "model": {"path": answers.checkpoint, "dtype": "float32" if small else "bfloat16"},
        "lora": {"rank": 16, "alpha": 64},
        "data": data,
        "trainer": _trainer(answers.stage),
    }
    for change in changes:  # "trainer.a: 1, b: 2"
        name, _, values = change.partition(".")
        sections[name] |= yaml.safe_load(f"{{{values}}}")
    lines = [
        f"# {summary}",
        _section(model=sections["model"]),
        f"# Should show: {PRESETS[answers.preset].shows} ({PRESETS[answers.preset].source}).",
        *_method(answers.preset),
        "# alpha / rank scales the adapter; this toolkit's default is 4.",
        _section(lora=sections["lora"]),
        "# full: vLLM serves only the merged model; with lora or frozen, the adapter, too.",
        _section(router={"train": "full"}),
        f"# {answers.data}: {layout(answers.data, answers.stage)}. 'moe-finetune preview' shows "
        "what rows become.",
        _section(data=sections["data"]),
        f"# Any field of TRL's {STAGES[answers.stage].config}. 32 rows a step on one device.",
        *_why(changes),
        _section(trainer=sections["trainer"]),
    ]
    if answers.stage != "sft":
        lines.insert(1, _section(stage=answers.stage))
    if answers.suite is not None:
        lines.append(_section(evaluation={"suite": answers.suite}))
    return "\n".join(lines)


def _why(changes: Sequence[str]) -> list[str]:
    machine = f"# So that a step fits this machine's {machine_bytes() / GIB:.0f} GiB: "
    return [machine + "; ".join(changes)] if changes else []


def memory_changes(recipe: Recipe) -> list[str]:
    """Changes, the least costly first, with which a step of ``recipe`` fits this machine."""
    config, _ = open_config(recipe.model.path)
    fixed = fixed_bytes(adapted_meta(config, recipe), recipe)
    if plainly_fits(config, recipe, fixed, machine_room()):
        return []
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    changes: list[str] = []
    try:
        for section, values in (("", {}), *_SMALLER):
            if section:
                sections = recipe.to_mapping()
                sections[section] |= values
                recipe = Recipe.model_validate(sections)
                words = ", ".join(f"{k}: {yaml.safe_dump(v).split()[0]}" for k, v in values.items())
                changes.append(f"{section}.{words}")
            if plan_recipe(config, recipe, device).fits(machine_bytes() / GIB):
                return changes
    except UnsupportedModelError:  # its step cannot be planned
        return []
    return changes


def check_method(name: str) -> None:
    """Refuse a preset that does not exist."""
    if name not in PRESETS:
        raise RecipeError(f"--method {name}: unknown{did_you_mean(name, PRESETS)}")


def _trainer(stage: str) -> dict[str, Any]:
    rows = 2 if stage == "dpo" else 4  # of preferences, both answers are in a batch
    return {
        "num_train_epochs": 1,
        "learning_rate": 1e-5 if stage == "dpo" else 1e-4,
        **({"beta": 0.1} if stage == "dpo" else {}),
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": 32 // rows,
        "seed": 42,
    }


def _method(preset: str) -> list[str]:
    """The lines of ``method:``, with shares, so the effect is visible with any model and batch."""
    if set(PRESETS[preset].terms) <= set(WEIGHTED):
        return [_section(method={"preset": preset})]
    return [
        "# Each loss's gradient, over that of the trainer's loss; without it, the paper's weights.",
        _section(method={"preset": preset, "share": 0.1}),
    ]


def layout(source: str, stage: str = "sft") -> str:
    """The detected layout of the first row of ``source``.

    Raises:
        DataError: the row cannot be read, or its fields are unknown.
    """
    if stage != "sft":
        former: Any = StageFormer(STAGES[stage])
        next(iter(SourceReader(DataSource(path=source), former, "train", 0)))
        return ", ".join(FIELDS[STAGES[stage].form])
    reader = SourceReader.of(DataSource(path=source), DataSection(train=source))
    next(iter(reader))
    return reader.former.detected


def write_starter(answers: Answers, output: Path) -> None:
    """Write the recipe to a new file if a run would accept it.

    Raises:
        OutputExistsError: the file exists.
        EvaluationError: an unknown suite.
    """
    refuse_existing(output)
    text = starter(answers)
    recipe = recipe_from_tree(Tree(yaml.safe_load(text)))
    with terminal().announced("init"):
        changes = memory_changes(recipe)
    text = starter(answers, changes) if changes else text
    if recipe.evaluation is not None:
        load_suite(recipe.evaluation.suite)
    write_new(output, text)


def _section(**values: Any) -> str:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
