"""A study recipe: a base recipe, axes of variation, seeds, and what to tabulate.

.. code-block:: yaml

    extends: common.yaml                # another study recipe, laid below this one
    title: Methods on two models
    base:                               # recipe keys; files relative to this one
      extends: [../data/gsm8k.yaml, ../training/p0_lora.yaml]
    axes:
      model:                            # named arms: a recipe file, or recipe keys (with extends)
        deepseek_v2_lite: ../models/deepseek_v2_lite.yaml
        moonlight: {extends: ../models/moonlight_16b_a3b.yaml, lora: {rank: 16}}
      method: [aux_loss, erc]           # a recipe key and its values
    seeds: [42, 43, 44]
    baseline: aux_loss                  # or {method: aux_loss}; compared within each model
    metrics: {max_violation: lower}     # of metrics.jsonl or routing/after.json, with benchmarks;
                                        # perplexity, average (of the benchmarks), and METRIC_rmse
                                        # with `curves`
    curves: aux_loss                    # METRIC_rmse: from the logged curve of these runs
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr, field_validator

from moe_finetune.errors import StudyError, did_you_mean
from moe_finetune.recipe.explain_errors import from_tree
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.section_base import Section
from moe_finetune.recipe.yaml_tree import Tree, find_recipe, load_tree, recipes_folder

NOT_VARIED = "trainer.seed"


class LaunchSection(Section):
    """How the runs are started.

    ``process``: one after another in child processes; ``inline``: in this process, for runs of
    seconds; ``accelerate``: child processes under ``accelerate launch`` with ``config``, a file of
    ``recipes/hardware``.
    """

    kind: Literal["process", "inline", "accelerate"] = Field(
        default="process", description="how the runs are started"
    )
    config: str | None = Field(default=None, description="accelerate's --config_file")


class StudyRecipe(Section):
    """Everything that decides a study. Read one with :func:`load_study`."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$",
        description="name of the study; default: the file's name",
    )
    title: str = Field(default="", description="heading of table and page")
    source: str = Field(default="", description="paper, and its table or figure")
    base: dict[str, Any] = Field(
        default={}, description="keys of every run's recipe, with `extends` for recipe files"
    )
    axes: dict[str, list[Any] | dict[str, Any]] = Field(
        default={},
        description="axis -> named arms (a recipe file, or keys), or a recipe key's values",
    )
    only: dict[str, list[str]] = Field(default={}, description="axis -> the arms to run")
    seeds: list[int] = Field(min_length=1, description="seeds of each combination")
    together: list[str] = Field(
        default=[], description="axes whose runs share a row: each benchmark from its own run"
    )
    baseline: str | int | float | dict[str, Any] | None = Field(
        default=None, description="an arm, or `{axis: arm}`, that the others are tested against"
    )
    curves: str | int | float | dict[str, Any] | None = Field(
        default=None, description="as baseline: whose logged curves METRIC_rmse is measured from"
    )
    benchmarks: list[str] | None = Field(
        default=None, description="labels of the tabulated benchmarks; default: all"
    )
    metrics: dict[str, Literal["lower", "higher"]] = Field(
        default={},
        description="metric -> better direction, besides the benchmarks. `average`: their mean",
    )
    discard: list[Literal["merged", "checkpoints"]] = Field(
        default=[], description="folders of a run to delete when it is finished"
    )
    launch: LaunchSection = LaunchSection()

    _tree: Tree = PrivateAttr(default_factory=Tree)
    _arguments: list[str] = PrivateAttr(default_factory=list)
    _source: Path | None = PrivateAttr(default=None)

    @field_validator("seeds")
    @classmethod
    def _seeds(cls, value: list[int]) -> list[int]:
        for seed in value:
            if value.count(seed) > 1:
                raise ValueError(f"{seed} is listed twice")
        return value

    @property
    def tree(self) -> Tree:
        return self._tree

    @property
    def overrides(self) -> list[str]:
        return [item for item in self._arguments if _first_key(item) in Recipe.model_fields]

    @property
    def arguments(self) -> list[str]:
        return self._arguments

    @property
    def file(self) -> Path | None:
        return self._source


def find_study(path: str | Path) -> Path:
    """The file of a study: ``path`` itself, or the shipped one of that name."""
    path = find_recipe(Path(path))
    if path.is_file() or path.suffix or len(path.parts) > 1:
        return path
    shipped = recipes_folder() / "studies" / f"{path}.yaml"
    if not shipped.is_file():
        shipped_names = [file.stem for file in shipped.parent.glob("*.yaml")]
        raise StudyError(f"no study '{path}'{did_you_mean(str(path), shipped_names)}")
    return shipped


def load_study(path: str | Path, overrides: Sequence[str] = ()) -> StudyRecipe:
    """Read a study recipe: a file, or the name of a study that comes with the package.

    In ``overrides``, a recipe key (``trainer.max_steps=5``) applies to every run, any other to the
    study (``seeds=[1,2]``, ``launch.kind=inline``).
    """
    path = find_study(path)
    study_overrides = [item for item in overrides if _first_key(item) not in Recipe.model_fields]
    tree = load_tree([path], study_overrides)
    if {"model", "data"} & tree.values.keys() and "base" not in tree.values:
        raise StudyError(
            f"{path}: is a recipe, not a study; a study names it, as in base: {{extends: "
            f"{path.name}}}, with axes and seeds (docs/reference/study.md has an example)"
        )
    study = study_from_tree(tree, path.stem)
    study._arguments, study._source = list(overrides), path
    return study


def study_from_tree(tree: Tree, name: str) -> StudyRecipe:
    """Validate merged values; ``name`` is the study's name unless the values set one."""
    study = from_tree(StudyRecipe, tree, StudyError, name=name)
    study._tree = tree
    return study


def _first_key(override: str) -> str:
    return override.partition("=")[0].strip().partition(".")[0]
