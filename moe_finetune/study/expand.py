"""Expand a study recipe to its runs: one for each combination of axis values and each seed."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moe_finetune.errors import RecipeError, StudyError, did_you_mean
from moe_finetune.recipe.schema import Recipe, recipe_from_tree
from moe_finetune.recipe.yaml_tree import Key, Tree, load_tree
from moe_finetune.study.recipe import NOT_VARIED, StudyRecipe

REFERENCES: tuple[Literal["baseline", "curves"], ...] = ("baseline", "curves")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


@dataclass(frozen=True)
class Run:
    """One run of a study: an arm, whose name joins those of its value on each axis by ``-``
    (``base`` without axes), with a ``trainer.seed``.
    """

    arm: str
    seed: int
    values: dict[str, str]
    recipe: Recipe

    @property
    def name(self) -> str:
        return f"{self.arm}/seed_{self.seed}"


@dataclass(frozen=True)
class Choice:
    """One value of an axis: its name and the recipe layers that it adds to the base."""

    name: str
    layers: tuple[Tree, ...]


def expand(study: StudyRecipe) -> list[Run]:
    """Return the runs, the last axis varying fastest before the seeds."""
    base = _layers(study.tree, ("base",))
    axes = _selected(study, {name: _choices(study, name) for name in study.axes})
    names = {name: [c.name for c in choices] for name, choices in axes.items()}
    for key in REFERENCES:
        reference_of(study, key, names)
    _check_together(study)
    _check_overrides(study)
    runs: list[Run] = []
    for chosen in itertools.product(*axes.values()):
        values = {axis: choice.name for axis, choice in zip(axes, chosen, strict=True)}
        arm = "-".join(values.values()) or "base"
        if any(run.arm == arm for run in runs):
            raise StudyError(
                f"{study.name}: two combinations of values are both called '{arm}'; name the "
                "values of an axis with a mapping"
            )
        layers = [*base, *(layer for choice in chosen for layer in choice.layers)]
        recipe = _recipe(layers, study.seeds[0], study.overrides, arm)
        for seed in study.seeds:
            of_seed = {"trainer": {**recipe.trainer, "seed": seed}}
            runs.append(Run(arm, seed, values, recipe.model_copy(update=of_seed)))
    return runs


def different_routers(runs: list[Run]) -> str:
    """A sentence if the arms' routers train differently, so that their routing may too; or ""."""
    arms: dict[str, list[str]] = {}
    for run in runs:
        names = arms.setdefault(run.recipe.router.train, [])
        names += [] if run.arm in names else [run.arm]
    if len(arms) < 2:
        return ""
    listed = "; ".join(
        f"{train} in {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}"
        for train, names in arms.items()
    )
    return f"router.train differs between arms ({listed}): so may their routing"


def reference_of(
    study: StudyRecipe, key: Literal["baseline", "curves"], names: dict[str, list[str]]
) -> dict[str, str]:
    """The value on each axis that ``key`` names as what others are compared with; ``{}`` without
    it.
    """
    reference, origin = getattr(study, key), study.tree.origin((key,)) or study.name
    if reference is None:
        return {}
    if not isinstance(reference, dict):
        holders = [axis for axis, all_names in names.items() if _named(reference, axis, all_names)]
        if len(holders) > 1:
            raise StudyError(
                f"{origin}: {key}: {', '.join(holders)} all have a value '{reference}'; write "
                f"{key}: {{{holders[0]}: {reference}}}"
            )
        if not holders:
            all_names = [name for values in names.values() for name in values]
            raise StudyError(
                f"{origin}: {key}: no axis has a value '{reference}'"
                f"{did_you_mean(str(reference), all_names)}"
            )
        reference = {holders[0]: reference}
    chosen = {}
    for axis, value in reference.items():
        if axis not in names:
            raise StudyError(f"{origin}: {key}.{axis}: unknown axis{did_you_mean(axis, names)}")
        name = _named(value, axis, names[axis])
        if name is None:
            raise StudyError(
                f"{origin}: {key}.{axis}: unknown value '{value}'"
                f"{did_you_mean(str(value), names[axis])}"
            )
        chosen[axis] = name
    return chosen


def _selected(study: StudyRecipe, axes: dict[str, list[Choice]]) -> dict[str, list[Choice]]:
    """The choices that ``only`` lists, in its order."""
    for axis, chosen in study.only.items():
        origin = study.tree.origin(("only", axis)) or study.name
        if axis not in axes:
            raise StudyError(f"{origin}: only.{axis}: unknown axis{did_you_mean(axis, axes)}")
        by_name = {choice.name: choice for choice in axes[axis]}
        for name in chosen:
            if name not in by_name:
                raise StudyError(
                    f"{origin}: only.{axis}: unknown value '{name}'{did_you_mean(name, by_name)}"
                )
        if not chosen or len(set(chosen)) < len(chosen):
            raise StudyError(f"{origin}: only.{axis}: expected at least one value, each once")
        axes = {**axes, axis: [by_name[name] for name in chosen]}
    return axes


def _named(value: Any, axis: str, names: list[str]) -> str | None:
    """The name of ``value`` on an axis, which may be ``value`` itself; None if unknown."""
    for name in (str(value), value_name(axis, value)):
        if name in names:
            return name
    return None


def value_name(axis: str, value: Any) -> str:
    """The name of a recipe key's value, such as ``aux_loss`` or ``alpha_0.4``."""
    if isinstance(value, str):
        text = Path(value).stem if "/" in value else value
    else:
        text = f"{axis.rpartition('.')[2]}_{value}"
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", text).strip("_-.")


def _choices(study: StudyRecipe, axis: str) -> list[Choice]:
    key: Key = ("axes", axis)
    origin, values = study.tree.origin(key) or study.name, study.axes[axis]
    if not values:
        raise StudyError(f"{origin}: axes.{axis}: is empty; give at least one value")
    if isinstance(values, dict):
        choices = [Choice(str(name), tuple(_layers(study.tree, (*key, name)))) for name in values]
    else:
        choices = list(_values(study, axis, values, origin))
    names = [choice.name for choice in choices]
    for name in names:
        if names.count(name) > 1:
            raise StudyError(
                f"{origin}: axes.{axis}: two values are named '{name}'; name them with a mapping"
            )
        if not _NAME.fullmatch(name):
            raise StudyError(
                f"{origin}: axes.{axis}: '{name}' cannot name a folder; use letters, digits, _ . +"
            )
    return choices


def _values(study: StudyRecipe, axis: str, values: list[Any], axis_origin: str) -> Iterator[Choice]:
    """Choices of an axis that is a recipe key with a list of values."""
    parts = axis.split(".")
    if parts[0] not in Recipe.model_fields:
        near = did_you_mean(parts[0], Recipe.model_fields)
        raise StudyError(
            f"{axis_origin}: axes.{axis}: not a key of a recipe{near}"
            " (an axis of another name maps the names of its arms to recipe keys)"
        )
    if axis == NOT_VARIED:
        raise StudyError(f"{axis_origin}: axes.{axis}: list the seeds in `seeds`")
    for index, value in enumerate(values):
        nested: Any = value
        for part in reversed(parts):
            nested = {part: nested}
        origin = study.tree.origin(("axes", axis, index)) or axis_origin
        yield Choice(value_name(axis, value), (Tree(nested, {tuple(parts): origin}),))


def _layers(tree: Tree, key: Key) -> list[Tree]:
    """The recipe layers at ``key``: the files that it extends, then the keys written there."""
    value: Any = tree.values
    for part in key:
        value = value.get(part) if isinstance(value, dict) else None
    origin = tree.origin(key)
    if value is None:
        return []
    if isinstance(value, str | list):
        value = {"extends": value}
    if not isinstance(value, dict):
        raise StudyError(f"{origin}: {'.'.join(map(str, key))}: expected a file or recipe keys")
    keys = {name: item for name, item in value.items() if name != "extends"}
    files = value.get("extends", [])
    files = [files] if isinstance(files, str) else files
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise StudyError(f"{origin}: extends: expected a file or a list of files")
    folder = _folder(tree.origin((*key, "extends")) or origin)
    for file in files:
        if not (folder / file).is_file():
            raise StudyError(
                f"{origin}: extends: no file {folder / file} (paths are relative to {folder})"
            )
    start = len(key)
    origins = {k[start:]: where for k, where in tree.origins.items() if k[:start] == key}
    return [*(load_tree([folder / file]) for file in files), Tree(keys, origins)]


def _folder(origin: str) -> Path:
    """The folder that paths written at ``origin`` are relative to."""
    file = Path(origin.rpartition(":")[0])
    return file.parent if file.is_file() else Path()


def _check_together(study: StudyRecipe) -> None:
    origin = study.tree.origin(("together",)) or study.name
    for axis in study.together:
        if axis not in study.axes:
            raise StudyError(
                f"{origin}: together: unknown axis '{axis}'{did_you_mean(axis, study.axes)}"
            )
        if isinstance(study.baseline, dict) and axis in study.baseline:
            raise StudyError(
                f"{origin}: together: '{axis}' is also an axis of the baseline; remove it from "
                "one of them"
            )


def _check_overrides(study: StudyRecipe) -> None:
    for override in study.overrides:
        key = override.partition("=")[0].strip()
        if key in study.axes or key == NOT_VARIED:
            remedy = "set seeds=[...]" if key == NOT_VARIED else "change the axis in the study"
            raise StudyError(f"'{override}': the study varies {key}; {remedy}")


def _recipe(layers: list[Tree], seed: int, overrides: list[str], arm: str) -> Recipe:
    tree = Tree()
    for layer in [*layers, Tree({"trainer": {"seed": seed}}, {("trainer", "seed"): "seeds"})]:
        tree.merge(layer)
    override_tree = load_tree([], overrides)
    tree.merge(override_tree)
    try:
        return recipe_from_tree(tree)
    except RecipeError as error:
        raise RecipeError(f"arm {arm}: {error}") from None
