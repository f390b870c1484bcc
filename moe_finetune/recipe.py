"""A recipe: everything that decides a run, validated, resolved and hashed.

``load_recipe(["recipe.yaml"], ["data.train=my.jsonl"])`` -> :class:`Recipe`. The resolved recipe is
saved with the run, and loading that copy gives an equal recipe with the same hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    SerializeAsAny,
    Tag,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from moe_finetune.errors import RecipeError, did_you_mean
from moe_finetune.layered_yaml import Tree, dotted, load_tree, merge_mappings
from moe_finetune.validation import describe, from_tree


class Section(BaseModel):
    """A mapping of the recipe: unknown keys and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, validate_default=False)


class ModelSection(Section):
    """The checkpoint to start from.

    ``init: random`` takes only config and tokenizer from it, lays ``config`` over the former and
    trains a model from scratch, without an adapter.
    """

    path: str = Field(min_length=1, description="folder or hub id")
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    revision: str | None = None
    tokenizer: str | None = Field(default=None, description="folder or hub id; default: path")
    attn_implementation: str | None = None
    init: Literal["checkpoint", "random"] = "checkpoint"
    config: dict[str, Any] = Field(default={}, description="keys of config.json to change")


class Perturbations(Section):
    """Noise that some methods put into routing while training."""

    jitter: float | None = Field(default=None, gt=0, lt=1)
    expert_dropout: float | None = Field(default=None, gt=0, lt=1)
    random_second_choice: bool = False


class Method(Section):
    """Which losses are added, and what else a method does to routing.

    ``terms`` maps a loss's name to its validated options; a term of weight 0 is not in it. Build
    one with :func:`resolve_method`.
    """

    model_config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)

    preset: str | None = None
    terms: dict[str, SerializeAsAny[BaseModel]] = {}
    token_mask: Literal["attention", "labels"] = "attention"
    perturbations: Perturbations = Perturbations()
    bias_update: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    export_bias: Literal["write", "drop"] = "write"

    @field_serializer("terms")
    def _with_removed(self, terms: dict[str, BaseModel]) -> dict[str, Any]:
        """Say which of the preset's terms are off, so that the dump resolves to the same method."""
        removed = set(_preset(self.preset).get("terms", {})) - set(terms) if self.preset else ()
        dumped = {name: options.model_dump(mode="json") for name, options in terms.items()}
        return dumped | {name: {"weight": 0.0} for name in sorted(removed)}


class RouterSection(Section):
    """How the routers learn: all weights, through LoRA, or not at all."""

    train: Literal["full", "lora", "frozen"] = "full"


class LoraSection(Section):
    """The adapter; ``lora: null`` trains the whole model. ``alpha`` defaults to 4 x rank (P0)."""

    rank: int | None = Field(default=None, ge=1)
    alpha: float | None = Field(default=None, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    targets: list[Literal["attention", "shared_experts", "experts"]] = [
        "attention",
        "shared_experts",
        "experts",
    ]
    experts: str = Field(default="all", description="all, or a selection file")

    @model_validator(mode="after")
    def _alpha(self) -> LoraSection:
        if self.alpha is None and self.rank is not None:
            self.alpha = 4.0 * self.rank
        return self


class DataSource(Section):
    """One of several sources, with columns of its own; what is unset is the section's.

    ``where`` keeps rows by a field's values; ``words`` turns a field's number into the word at that
    place, as a label of a classification task; ``limit`` counts the rows that are kept.
    """

    path: str = Field(min_length=1, description="file, folder or hub id")
    format: Literal["auto", "messages", "prompt_completion", "text"] | None = None
    columns: dict[str, str] | None = None
    template: dict[str, str] | None = None
    split: str | None = None
    limit: int | None = Field(default=None, ge=1)
    where: dict[str, list[str | int]] = Field(default={})
    words: dict[str, list[str]] = Field(default={})

    @model_validator(mode="after")
    def _agree(self) -> DataSource:
        if self.columns and self.template:
            raise ValueError("columns and template cannot be combined; keep one of them")
        return self


def _kind(value: Any) -> str:
    return "Text" if isinstance(value, str) else "Source"


# Told apart by their type, so that an error is the one of what was meant.
Source = Annotated[
    Annotated[str, Tag("Text")] | Annotated[DataSource, Tag("Source")], Discriminator(_kind)
]
Paths = str | list[Source]


class DataSection(Section):
    """The examples, and how they become tokens."""

    train: Paths
    validation: Paths | None = None
    format: Literal["auto", "messages", "prompt_completion", "text"] = "auto"
    columns: dict[str, str] | None = Field(
        default=None, description="our field -> the file's: {prompt: question, completion: answer}"
    )
    template: dict[str, str] | None = Field(
        default=None, description='our field from theirs: {prompt: "Q: {question}\\nA:", ...}'
    )
    chat_template: str | None = Field(default=None, description="chatml, or a Jinja file")
    max_length: int = Field(default=2048, ge=2)
    overlong: Literal["truncate", "drop", "error"] = "truncate"
    packing: bool = False
    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = "bfd"
    completion_only_loss: bool | None = Field(
        default=None, description="default: on where there is a completion"
    )
    split: str = "train"
    limit: int | None = Field(default=None, ge=1)
    seed: int | None = Field(default=None, description="order of the rows; default: trainer.seed")
    num_proc: int | None = Field(default=None, ge=1)


class ExportSection(Section):
    """What is written after training. ``verify`` defaults to ``merge``."""

    merge: bool = True
    verify: bool | None = None

    @model_validator(mode="after")
    def _verify(self) -> ExportSection:
        if self.verify is None:
            self.verify = self.merge
        return self


class EvaluationSection(Section):
    """What the merged checkpoint is tested on."""

    suite: str = Field(min_length=1, description="name or file of a suite")
    backend: Literal["vllm", "hf"] = "vllm"
    only: list[str] | None = Field(
        default=None, min_length=1, description="labels of the suite's tasks"
    )
    limit: int | None = Field(default=None, ge=1)
    data_dir: str | None = Field(default=None, description="folder of local task data")
    vllm: dict[str, Any] = {}


class LoggingSection(Section):
    """What the callback logs beside the trainer's own values."""

    routing: bool = True
    every: int | None = Field(default=None, ge=1, description="steps; default: trainer's")


class NumericsSection(Section):
    """What happens when numbers go wrong, and whether every operation must repeat exactly.

    ``max_violation`` and ``dead_experts`` are limits of a router that has not collapsed, see
    :class:`moe_finetune.training.numerics.CollapseWatch`; ``patience`` counts logs.
    """

    on_nan: Literal["stop", "skip"] = "stop"
    max_violation: float | None = Field(
        default=None, gt=0, description="default: 0.75 x (experts / selected - 1)"
    )
    dead_experts: float = Field(default=0.5, gt=0, le=1, description="share of the experts")
    patience: int = Field(default=5, ge=1)
    deterministic: bool = False


class Recipe(Section):
    """A run, completely described."""

    model: ModelSection
    method: Method = Method(preset="none")
    router: RouterSection = RouterSection()
    lora: LoraSection | None = LoraSection(rank=32, alpha=128.0, dropout=0.1)
    data: DataSection
    trainer: dict[str, Any] = {}
    export: ExportSection = ExportSection()
    evaluation: EvaluationSection | None = None
    logging: LoggingSection = LoggingSection()
    numerics: NumericsSection = NumericsSection()

    @field_validator("method", mode="before")
    @classmethod
    def _resolve(cls, value: Any) -> Any:
        return value if isinstance(value, Method) else resolve_method(value)

    @field_validator("trainer")
    @classmethod
    def _trainer(cls, value: dict[str, Any]) -> dict[str, Any]:
        from moe_finetune.training.arguments import check_trainer

        problems = list(check_trainer(value)) if value else []
        if problems:
            raise RecipeError("\n".join(problems))
        return value

    @model_validator(mode="after")
    def _agree(self) -> Recipe:
        problems = list(_contradictions(self))
        if problems:
            raise RecipeError("\n".join(problems))
        return self

    @classmethod
    def from_preset(cls, preset: str, model: str, train: Paths, **sections: Any) -> Recipe:
        """A recipe from a method's preset, a checkpoint and training data; the rest as keys.

        ``Recipe.from_preset("erc", "my/checkpoint", "my.jsonl", trainer={"max_steps": 50})``
        """
        values = {"model": {"path": model}, "method": {"preset": preset}, "data": {"train": train}}
        return recipe_from_tree(Tree(merge_mappings(values, sections)))

    def to_mapping(self) -> dict[str, Any]:
        """Plain values of every key, defaults included."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """The resolved recipe as YAML; :func:`load_recipe` reads it back to an equal recipe."""
        return yaml.safe_dump(self.to_mapping(), sort_keys=False, allow_unicode=True)

    @property
    def hash(self) -> str:
        """SHA-256 of the resolved content, independent of the files it came from."""
        text = json.dumps(self.to_mapping(), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def seed(self) -> int:
        """Seed of the run (``trainer.seed``, 42 when unset, as in transformers)."""
        return int(self.trainer.get("seed", 42))


def load_recipe(paths: Sequence[str | Path] | str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, merge, override and validate recipe files (later ones win).

    Raises:
        RecipeError: one line for each problem, with the file, line and dotted key.
    """
    if isinstance(paths, str | Path):
        paths = [paths]
    return recipe_from_tree(load_tree(paths, overrides))


def recipe_from_tree(tree: Tree) -> Recipe:
    """Validate merged values; raise RecipeError that names where each problem was written."""
    return from_tree(Recipe, tree)


def resolve_method(method: str | dict[str, Any] | Method | None, **overrides: Any) -> Method:
    """A preset's name or a ``method:`` mapping -> :class:`Method` with validated options.

    ``overrides`` are keys of ``method:`` laid over it. A term of weight 0 is removed.

    Raises:
        RecipeError: an unknown preset, term or option (with the nearest known one), or a value
            outside its range.
    """
    if isinstance(method, Method):
        given = method.model_dump(mode="json")
    else:
        given = {"preset": method} if isinstance(method, str) else dict(method or {})
    given = merge_mappings(given, overrides)
    preset = given.get("preset")
    if preset is not None and not isinstance(preset, str):
        raise RecipeError(f"method.preset: {preset!r} is not the name of a preset")
    given = merge_mappings(_preset(preset), given) if preset else given
    given["terms"] = _terms(given.get("terms") or {})
    try:
        return Method.model_validate(given)
    except ValidationError as error:
        raise RecipeError("\n".join(describe(Method, error, ("method",)))) from None


def _preset(name: str) -> dict[str, Any]:
    from moe_finetune.losses.presets import PRESETS

    if name not in PRESETS:
        raise RecipeError(f"method.preset: unknown preset '{name}'{did_you_mean(name, PRESETS)}")
    return PRESETS[name].method()


def _terms(terms: Any) -> dict[str, BaseModel]:
    from moe_finetune.losses import TERMS

    if not isinstance(terms, dict):
        raise RecipeError(f"method.terms: {terms!r} is not a mapping of losses to their options")
    resolved: dict[str, BaseModel] = {}
    for name, options in terms.items():
        place = ("method", "terms", name)
        if name not in TERMS:
            raise RecipeError(f"{dotted(place)}: unknown loss{did_you_mean(str(name), TERMS)}")
        if not isinstance(options, dict):
            raise RecipeError(
                f"{dotted(place)}: {options!r} is not a mapping such as {{weight: 1.0e-3}}"
            )
        model = TERMS[name].Options
        try:
            validated = model.model_validate(options)
        except ValidationError as error:
            raise RecipeError("\n".join(describe(model, error, place))) from None
        if validated.weight > 0:
            resolved[name] = validated
    return resolved


def _contradictions(recipe: Recipe) -> Iterator[str]:
    """Combinations that cannot run, one line each, starting with the key to change."""
    lora, router, data = recipe.lora, recipe.router.train, recipe.data
    if recipe.model.init == "random":
        if lora is not None:
            yield "lora: an adapter over random weights learns nothing of use; set lora: null"
        if router == "frozen":
            yield "router.train: 'frozen' would keep random routers; set it to full"
    elif recipe.model.config:
        yield "model.config: changes a model that is made anew; set model.init: random"
    if lora is None:
        if router == "lora":
            yield "router.train: 'lora' needs a `lora:` section with a rank"
    else:
        if lora.rank is None:
            yield "lora.rank: is missing; wanted a whole number such as 32"
        if not lora.targets and router == "frozen":
            yield "lora.targets: an empty list with router.train 'frozen' leaves nothing to train"
        if lora.experts != "all" and "experts" not in lora.targets:
            yield "lora.experts: a selection of experts needs 'experts' in lora.targets"
    if data.columns and data.template:
        yield "data.template: cannot be combined with data.columns; keep one of them"
    if data.format == "text" and data.completion_only_loss:
        yield "data.completion_only_loss: true needs completions, and data.format is 'text'"
    if data.packing and data.packing_strategy != "bfd" and data.format not in ("text", "auto"):
        yield (
            f"data.packing_strategy: '{data.packing_strategy}' cuts examples apart and is for "
            f"data.format 'text'; wanted 'bfd' for '{data.format}'"
        )
    if recipe.export.verify and not recipe.export.merge:
        yield "export.verify: true needs export.merge: true; there is nothing else to verify"
    if recipe.evaluation and not recipe.export.merge:
        yield "evaluation: needs export.merge: true, because the merged checkpoint is evaluated"
