"""The recipe of a miniature: its arms, data and seeds."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator

from moe_finetune.errors import RecipeError, did_you_mean
from moe_finetune.recipe.method import resolve_method
from moe_finetune.recipe.section import Section
from moe_finetune.recipe.tree import load_tree, merge_mappings
from moe_finetune.recipe.validation import from_tree

TABLE = "token_frequencies.safetensors"


def _fields_of(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(kind)]
    for name in values:
        if name not in names:
            raise ValueError(f"unknown key '{name}'{did_you_mean(name, names)}")
    return values


class RecoverySection(Section):
    """Figure 2 of P4: sizes of :func:`eval.effects.theory.recovery.coherence_sweep`."""

    count: int = Field(default=16, ge=2)
    k: int = Field(default=6, ge=1)
    width: int = Field(default=32, ge=2)
    trials: int = Field(default=40, ge=1)


class ClassificationSection(Section):
    """Figure 3 of P4. ``setting`` overrides the paper's values in :class:`Setting`."""

    arms: list[Literal["baseline", "orthogonality", "dpp", "ncl"]] = Field(min_length=1)
    setting: dict[str, int | float] = Field(default_factory=dict)

    @field_validator("setting")
    @classmethod
    def _known(cls, value: dict[str, Any]) -> dict[str, Any]:
        from eval.effects.theory.classification import Setting

        return _fields_of(Setting, value)


class FinetuneSection(Section):
    """Fine-tuning of the demo's checkpoint, one arm per method.

    Attributes:
        recipe: keys of a recipe that all arms share; ``model.path`` and the data are filled in.
        arms: name -> ``method:`` of a recipe.
        baselines: arm -> the arm that replaces ``aux_loss`` in its comparisons: a balance loss of
            the same kind and weight, without other losses.
        first_seeds: arm -> the number of seeds it runs with, from the first; others: all.
        probes: number of evenly spaced measurements on held-out examples during training; the
            untrained model is measured once for all arms.
        embeddings: number of tokens for expert overlap.
        tasks: largest number of passages in the held-out code and prose tasks.
        fresh_rows: number of held-out rows to measure on, drawn with a different seed and not in
            the demo's rows; 0: the demo's held-out rows.
        sums: number of arithmetic problems on held-out facts, drawn for each seed and the same for
            all arms, that every probe except the first answers (``sums`` in its row, in percent).
    """

    recipe: dict[str, Any] = Field(default_factory=dict)
    arms: dict[str, dict[str, Any]] = Field(min_length=1)
    baselines: dict[str, str] = Field(default_factory=dict)
    first_seeds: dict[str, PositiveInt] = Field(default_factory=dict)
    probes: int = Field(default=4, ge=1)
    embeddings: int = Field(default=1500, ge=20)
    tasks: int = Field(default=200, ge=1)
    fresh_rows: int = Field(default=0, ge=0)
    sums: int = Field(default=0, ge=0)


class ScratchSection(Section):
    """Pretraining from random weights, one arm per method.

    Attributes:
        arms: name -> ``method:`` of a recipe.
        model: changes to :class:`eval.demo.pretrain.Pretraining`.
        mixture: changes to :class:`eval.demo.batches.Mixture`.
        steps, learning_rate: for AdamW, with linear warm-up over the first tenth, then a cosine.
    """

    arms: dict[str, dict[str, Any]] = Field(min_length=1)
    model: dict[str, int | float] = Field(default_factory=dict)
    mixture: dict[str, int | float] = Field(default_factory=dict)
    steps: int = Field(default=100, ge=4)
    learning_rate: float = Field(default=3e-3, gt=0)
    gradient_norm: float = Field(default=1.0, gt=0)

    @field_validator("model")
    @classmethod
    def _model(cls, value: dict[str, Any]) -> dict[str, Any]:
        from eval.demo.pretrain import Pretraining

        return _fields_of(Pretraining, value)

    @field_validator("mixture")
    @classmethod
    def _mixture(cls, value: dict[str, Any]) -> dict[str, Any]:
        from eval.demo.batches import Mixture

        return _fields_of(Mixture, value)


class Miniature(Section):
    """Everything that determines a miniature study; omitted parts are not run.

    ``claims`` selects the comparisons of the table: :mod:`eval.effects.claims` or
    :mod:`eval.effects.claims_at_shares`.
    """

    kind: Literal["miniature"]
    title: str = "Headline effects in miniature"
    claims: Literal["headline", "shares"] = "headline"
    seeds: list[int] = Field(min_length=1)
    recovery: RecoverySection | None = None
    classification: ClassificationSection | None = None
    finetune: FinetuneSection | None = None
    scratch: ScratchSection | None = None
    upcycle: str | None = Field(default=None, description="folder of `upcycle`'s miniature")


def load_miniature(path: str | Path, overrides: Sequence[str] = ()) -> Miniature:
    """Read a miniature's recipe and check every arm's method.

    Raises:
        RecipeError: an unknown key, method or option; names its place.
    """
    study = from_tree(Miniature, load_tree([path], overrides))
    for part in (study.finetune, study.scratch):
        for arm, method in (part.arms if part else {}).items():
            check_name(str(path), arm)
            try:
                resolve_method(with_table(method, TABLE))
            except RecipeError as error:
                raise RecipeError(f"{path}: arms.{arm}: {error}") from None
    if study.finetune is not None:
        baselines = study.finetune.baselines
        for key, names in (
            ("first_seeds", study.finetune.first_seeds),
            ("baselines", [*baselines, *baselines.values()]),
        ):
            if unknown := set(names) - set(study.finetune.arms):
                raise RecipeError(
                    f"{path}: finetune.{key}: {sorted(unknown)} are not among finetune.arms"
                )
    return study


def check_name(path: str, arm: str) -> None:
    """Refuse an arm's name that cannot be a folder."""
    if not arm.replace("_", "").replace(".", "").replace("-", "").isalnum():
        raise RecipeError(f"{path}: arms.{arm}: a name may contain only letters, digits, _ - .")


def with_table(method: dict[str, Any], table: str) -> dict[str, Any]:
    """``method`` with the path of the token frequencies, if it supervises routing."""
    supervised = method.get("preset") == "supervised_routing" or (
        "supervised_routing" in (method.get("terms") or {})
    )
    if not supervised:
        return method
    defaults = {"terms": {"supervised_routing": {"table": table}}}
    return merge_mappings(defaults, method)
