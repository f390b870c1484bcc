"""``moe-finetune init``: a starter recipe for the user's checkpoint and data."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from moe_finetune.data.readers import SourceReader
from moe_finetune.errors import RecipeError, did_you_mean
from moe_finetune.evaluation.suites import load_suite
from moe_finetune.io.atomic import refuse_existing, write_new
from moe_finetune.losses.presets import PRESETS
from moe_finetune.models.loading import open_config
from moe_finetune.recipe.data import DataSection, DataSource
from moe_finetune.recipe.method import WEIGHTED
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.tree import Tree

SMALL = 1 << 20
"""Hidden size x experts x MoE layers below which float32 is cheap enough to be the default."""


@dataclass(frozen=True)
class Answers:
    """The inputs of a starter recipe.

    Attributes:
        checkpoint: folder or hub id.
        data: training rows: file, folder or hub id.
        validation: validation rows, or None.
        method: a preset's name.
        suite: evaluation suite, or None.
    """

    checkpoint: str
    data: str
    validation: str | None = None
    method: str = "orthogonal_variance"
    suite: str | None = None


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


def starter(answers: Answers) -> str:
    """The recipe as YAML with comments.

    Raises:
        RecipeError: an unknown method.
        DataError: the rows cannot be read, or their layout is unknown.
    """
    if answers.method not in PRESETS:
        raise RecipeError(
            f"--method {answers.method}: unknown{did_you_mean(answers.method, PRESETS)}"
        )
    summary, family, config = describe(answers.checkpoint)
    text = config.get_text_config()
    small = text.hidden_size * family.num_experts(text) * text.num_hidden_layers < SMALL
    data: dict[str, Any] = {"train": answers.data}
    if answers.validation is not None:
        data["validation"] = answers.validation
    data["max_length"] = 2048
    lines = [
        f"# {summary}",
        _section(model={"path": answers.checkpoint, "dtype": "float32" if small else "bfloat16"}),
        f"# Should show: {PRESETS[answers.method].shows} ({PRESETS[answers.method].source}).",
        *_method(answers.method),
        _section(lora={"rank": 16}, router={"train": "full"}),
        f"# {answers.data}: {layout(answers.data)}. 'moe-finetune preview' shows what rows become.",
        _section(data=data),
        "# Any field of TRL's SFTConfig. 4 x 8 rows a step on one device.",
        _section(
            trainer={
                "num_train_epochs": 1,
                "learning_rate": 1e-4,
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 8,
                "seed": 42,
            }
        ),
    ]
    if answers.suite is not None:
        lines.append(_section(evaluation={"suite": answers.suite}))
    return "\n".join(lines)


def _method(preset: str) -> list[str]:
    """The lines of ``method:``, with shares, so the effect is visible with any model and batch."""
    if set(PRESETS[preset].terms) <= set(WEIGHTED):
        return [_section(method={"preset": preset})]
    return [
        "# Each loss's gradient, over that of the trainer's loss; without it, the paper's weights.",
        _section(method={"preset": preset, "share": 0.1}),
    ]


def layout(source: str) -> str:
    """The detected layout of the first row of ``source``.

    Raises:
        DataError: the row cannot be read, or its fields are unknown.
    """
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
    if recipe.evaluation is not None:
        load_suite(recipe.evaluation.suite)
    write_new(output, text)


def _section(**values: Any) -> str:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
