"""Suites: YAML lists of tasks with version, shots, metric, filter and data source."""

import os
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moe_finetune.errors import EvaluationError, did_you_mean
from moe_finetune.io.yaml_file import read_yaml
from moe_finetune.recipe.explain_errors import describe
from moe_finetune.recipe.yaml_tree import find_recipe

_NAME, _LONGEST = re.compile(r"\w[\w .+-]*"), 120


class SuiteTask(BaseModel):
    """One line of a suite.

    Attributes:
        task: name of the task, group or tag in lm-evaluation-harness or in ``eval/tasks``; with
            ``template`` it is the name of the new task.
        label: key in results.json; the task's name unless given.
        template: a task file to instantiate with ``files``, for tasks that are pure data.
        version: the version that the installed task must have.
        shots: number of examples in the prompt.
        metric: the task's metric in tables.
        filter: which of the task's answer extractions ``metric`` is read from.
        source: where the data comes from (hub id or description).
        files: split -> file, relative to the data folder (or to the suite's file).
        limit: evaluate only the first items.
        chat: render prompts with the chat template.
        enable_thinking: variable of that name for the chat template; False closes the thoughts.
        max_tokens: cap on generated tokens, thoughts included, if the task's is too small or too
            large.
        code: generated programs are scored in the sandbox, in this form.
        aggregate: ``mean_acc`` is the unweighted mean of the group's accuracies.
        chance: the score of guessing, if known.
    """

    model_config = ConfigDict(extra="forbid")

    task: str
    label: str = ""
    template: str | None = None
    version: float | str | None = None
    shots: int | None = Field(default=None, ge=0)
    metric: str
    filter: str = "none"
    source: str = ""
    files: dict[str, str] = Field(default_factory=dict)
    limit: int | None = Field(default=None, gt=0)
    chat: bool = False
    enable_thinking: bool | None = None
    max_tokens: int | None = Field(default=None, gt=0)
    code: Literal["humaneval", "mbpp"] | None = None
    aggregate: Literal["mean_acc"] | None = None
    chance: float | None = None

    def model_post_init(self, context: Any) -> None:
        """Fill in the label, and refuse names that cannot name a folder."""
        self.label = self.label or self.task
        if self.enable_thinking is not None and not self.chat:
            raise ValueError("enable_thinking: is for the chat template; set chat: true, too")
        for key in ("task", "label"):
            name = getattr(self, key)
            if not _NAME.fullmatch(name) or len(name) > _LONGEST:
                raise ValueError(
                    f"{key} '{name:.60}' cannot name a folder; use up to {_LONGEST} letters, "
                    "digits, spaces and _ . + - , beginning with a letter or digit"
                )


class Suite(BaseModel):
    """A named list of tasks; relative data files are looked up in ``folder``.

    ``external`` says what of the suite other packages evaluate; it is shown with the scores.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    description: str = ""
    external: str = ""
    tasks: list[SuiteTask] = Field(min_length=1)
    folder: Path | None = Field(default=None, exclude=True)


def eval_root() -> Path:
    """Return the folder with ``tasks/`` and ``suites/``."""
    candidates = [
        Path(__file__).resolve().parents[2] / "eval",
        Path(sysconfig.get_path("data")) / "share" / "moe-finetune" / "eval",
    ]
    if named := os.environ.get("MOE_FINETUNE_EVAL"):
        candidates = [Path(named)]
    for folder in candidates:
        if (folder / "tasks").is_dir() and (folder / "suites").is_dir():
            return folder
    raise EvaluationError(
        f"no folder with tasks/ and suites/ in {', '.join(map(str, candidates))}; "
        "set MOE_FINETUNE_EVAL to the project's eval folder"
    )


def suite_names() -> list[str]:
    """Return the names of the suites that come with the package."""
    return sorted(path.stem for path in (eval_root() / "suites").glob("*.yaml"))


def load_suite(suite: str | Path | Suite) -> Suite:
    """Return a suite by name or from a YAML file; a :class:`Suite` is returned unchanged."""
    if isinstance(suite, Suite):
        return suite
    path = find_recipe(Path(suite))  # those of recipes/ are shipped, too
    if path.suffix not in (".yaml", ".yml"):
        path = eval_root() / "suites" / f"{suite}.yaml"
        if not path.is_file():
            file = next((f for f in (f"{suite}.yaml", f"{suite}.yml") if Path(f).is_file()), None)
            hint = f"; for the file here, give {file}" if file else "; or give a YAML file"
            known = "" if file else did_you_mean(str(suite), suite_names()).removesuffix("?")
            raise EvaluationError(f"unknown suite '{suite}'{known}{hint}")
    if not path.is_file():
        raise EvaluationError(f"suite file {path} does not exist")
    content = read_yaml(path, EvaluationError)
    try:
        loaded = Suite.model_validate(content)
    except ValidationError as error:
        raise EvaluationError(
            "\n".join(f"{path}: {line.removeprefix(': ')}" for line in describe(Suite, error))
        ) from None
    labels = [task.label for task in loaded.tasks]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise EvaluationError(f"{path}: label '{twice[0]}' occurs twice; give the entries a label")
    loaded.folder = path.resolve().parent
    return loaded


def select(suite: Suite, labels: Iterable[str]) -> Suite:
    """Return the suite with only the tasks of these labels."""
    by_label = {task.label: task for task in suite.tasks}
    chosen = list(labels)
    for label in chosen:
        if label not in by_label:
            raise EvaluationError(
                f"suite {suite.name} has no task '{label}'{did_you_mean(label, by_label)}"
            )
    tasks = [task for task in suite.tasks if task.label in chosen]
    external = suite.external if len(tasks) == len(suite.tasks) else ""
    return suite.model_copy(update={"tasks": tasks, "external": external})
