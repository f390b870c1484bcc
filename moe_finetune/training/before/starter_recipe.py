"""``moe-finetune init``: a starter recipe for the user's checkpoint and data."""

import itertools
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml

from moe_finetune.data.held_out import FEW
from moe_finetune.data.preference_and_prompt_forms import READ_BY, StageFormer
from moe_finetune.data.row_forms import STAGE_FIELDS
from moe_finetune.data.sources import SourceReader, listed
from moe_finetune.errors import RecipeError, did_you_mean
from moe_finetune.evaluation.suites import load_suite
from moe_finetune.io.atomic import refuse_existing, write_new
from moe_finetune.io.counted import counted, in_number
from moe_finetune.io.next_commands import losses
from moe_finetune.io.row_files import Row
from moe_finetune.io.split_files import has_validation
from moe_finetune.io.terminal import terminal
from moe_finetune.losses.presets import PRESETS
from moe_finetune.models.config_and_tokenizer import load_tokenizer, local_folder, open_config
from moe_finetune.recipe.data import DataSection
from moe_finetune.recipe.method import WEIGHTED, resolve_method
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.stages import STAGES
from moe_finetune.recipe.yaml_tree import Tree, load_tree, merge_mappings
from moe_finetune.training.before.smaller_steps import EVALUATED, Line, memory_changes, replaced
from moe_finetune.training.memory.plan import GIB, machine_bytes
from moe_finetune.training.memory.step_bytes import Device

SMALL = 1 << 20
"""Hidden size x experts x MoE layers below which float32 is cheap enough to be the default."""
GROUP = 8
"""Completions of a prompt in a starter for rewards."""
FEW_STEPS = 100
"""Below which a starter says that a run hardly changes a model."""
READ = 32 * FEW_STEPS
"""Rows that a starter is made from: enough to count the steps if they are few."""
HELD_OUT = 0.1
"""Share of the rows that a starter holds out for validation."""
SHORT_COMPLETION, LONG_COMPLETION = 64, 512
"""Tokens of a completion: at least, and where the model may reason before it answers."""


@dataclass(frozen=True)
class Answers:
    """The inputs of a starter recipe: the options and overrides of ``init``.

    Attributes:
        data: rows to learn from; None if an override has them.
        validation: rows, or the share of the rows that is held out; None for neither.
        overrides: ``key.path=value``, which win over everything else.
    """

    checkpoint: str
    data: str | None = None
    validation: str | float | None = HELD_OUT
    method: str = "none"
    suite: str | None = None
    stage: str = "sft"
    overrides: tuple[str, ...] = ()

    @cached_property
    def overridden(self) -> Tree:
        """The values of the overrides."""
        return load_tree([], self.overrides)

    @property
    def preset(self) -> str:
        """The method's preset, also of an override."""
        return str((self.overridden.values.get("method") or {}).get("preset", self.method))

    def tree(self, values: dict[str, Any]) -> Tree:
        """The values of a recipe with the overrides."""
        tree = Tree(values)
        tree.merge(self.overridden)
        return tree

    @cached_property
    def section(self) -> DataSection:
        """The ``data`` section; overrides say, for example, what the rows' fields are called."""
        values: dict[str, Any] = {
            "stage": self.stage,
            "model": {"path": self.checkpoint},
            "data": {} if self.data is None else {"train": self.data},
        }
        if self.stage == "grpo":
            values["rewards"] = ["exact_match"]  # required, and not known before rows are read
        if isinstance(self.overridden.values.get("lora"), dict):
            values["lora"] = {"rank": 1}  # required, and has its own line
        return recipe_from_tree(self.tree(values)).data

    @cached_property
    def rows(self) -> list[Row]:
        """The first rows, in the form of the stage."""
        rows: list[Row] = []
        for reader in self._readers:
            rows += [row for _, row in itertools.islice(reader, READ - len(rows))]
        return rows

    @cached_property
    def _readers(self) -> list[SourceReader]:
        stage = STAGES[self.stage]
        return [
            SourceReader(
                source,
                self.section,
                former=None
                if stage.form == "tokens"
                else StageFormer(stage, source.columns or self.section.columns),
            )
            for source in listed(self.section.train, "train")
        ]

    @property
    def layout(self) -> str:
        """The detected layout of the rows."""
        if (form := STAGES[self.stage].form) != "tokens":
            return ", ".join(STAGE_FIELDS[form])
        assert self.rows  # reading them detects it
        formers = [reader.former for reader in self._readers]
        return "; ".join(dict.fromkeys(former.detected or former.form for former in formers))

    @property
    def held_out(self) -> str | float | None:
        """The validation data: a share only of different rows, and only without files of it."""
        share = isinstance(self.validation, float)
        files = any(has_validation(source.path) for source in listed(self.section.train, "train"))
        if share and (files or all(row == self.rows[0] for row in self.rows)):
            return None
        return self.validation

    @property
    def share_held_out(self) -> float:
        """The share of the rows that the recipe holds out, also by an override; 0 for files."""
        data = self.overridden.values.get("data") or {}
        validation = data.get("validation", self.held_out)
        return validation if isinstance(validation, float) else 0.0


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


def starter(answers: Answers, changes: Sequence[Line] = ()) -> str:
    """The recipe as YAML, with a reason for every line; ``changes`` make a step fit."""
    summary, family, config = describe(answers.checkpoint)
    text = config.get_text_config()
    small = text.hidden_size * family.places(text).num_experts * text.num_hidden_layers < SMALL
    dtype = ("float32", "small enough") if small else ("bfloat16", "losses are in float32")
    stage = STAGES[answers.stage]
    lines: list[Line] = []
    if answers.stage != "sft":
        lines.append(("stage", answers.stage, f"TRL's {stage.trainer}"))
    lines += [
        ("model.path", answers.checkpoint, summary),
        ("model.dtype", *dtype),
        *_method_lines(answers),
        ("lora.rank", 16, "of attention and experts: lora.targets"),
        (
            "lora.alpha",
            _alpha(answers),
            "alpha / rank scales the adapter; 4 here, 1 to 2 in PEFT and axolotl",
        ),
        ("router.train", *_routers(answers)),
        ("data.train", answers.data, answers.layout),
    ]
    if answers.held_out is not None:
        lines.append(("data.validation", answers.held_out, _measured(answers)))
    lines.append(("data.max_length", 2048, "tokens; 'moe-finetune preview' shows what rows become"))
    if answers.stage == "grpo":
        lines.append(("rewards", [_reward(answers.rows[0])], "1 for a right completion, else 0"))
    lines += _trainer_lines(answers)
    if answers.suite is not None:
        lines.append(
            ("evaluation.suite", answers.suite, "the tuned model is scored, then its base")
        )
    for change in changes:
        lines = replaced(lines, change)
    for key, value in _leaves(answers.overridden.values):
        lines = replaced(lines, (key, value, "as given to init"))
    return _written(lines)


def _measured(answers: Answers) -> str:
    """When validation data are measured, and how many rows a share holds out if they are few."""
    when = "measured before, during and after"
    if not isinstance(answers.held_out, float):
        return when
    rows = len(answers.rows)
    few = max(1, round(answers.held_out * rows))
    if rows == READ or few >= FEW:
        return f"this share of the rows, {when}"
    return f"this share of the rows, {when}; about {few} of {rows}, so figures on them are rough"


def _method_lines(answers: Answers) -> Iterator[Line]:
    check_method(answers.preset)
    preset = PRESETS[answers.preset]
    yield "method.preset", preset.name, f"should show: {preset.shows}"
    if preset.recommended and answers.stage == "sft":
        why = "measured, see docs/methods.md; a number is each loss's share; left out: the paper's"
        yield "method.share", "recommended", why
    elif not set(preset.terms) <= set(WEIGHTED):
        why = "each loss's gradient over that of the trainer's loss; left out: the paper's weights"
        yield "method.share", 0.1, why


def _routers(answers: Answers) -> tuple[str, str]:
    method = answers.tree({"method": {"preset": answers.preset}}).values["method"]
    if resolve_method(method).trains_routers:
        return "full", "losses on routers need it; vLLM serves the merged model"
    return "auto", "frozen: no loss of the method trains routers"


def _alpha(answers: Answers) -> int:
    """Four times the rank, also of an override."""
    lora = answers.overridden.values.get("lora")
    rank = lora.get("rank") if isinstance(lora, dict) else None
    return 4 * (rank if isinstance(rank, int) else 16)


def _trainer_lines(answers: Answers) -> Iterator[Line]:
    # Of preferences, both answers are in a batch; of prompts, a group of completions.
    rows = {"dpo": 2, "grpo": GROUP}.get(answers.stage, 4)
    usual = (8 * GROUP if answers.stage == "grpo" else 32) // rows
    trainer = answers.overridden.values.get("trainer") or {}
    device_rows = trainer.get("per_device_train_batch_size", rows)
    step = device_rows * trainer.get("gradient_accumulation_steps", usual)
    yield "trainer.num_train_epochs", 1, _steps(answers, trainer, step)
    if answers.stage == "grpo":
        why = "completions of a prompt, compared with each other"
        yield "trainer.num_generations", GROUP, why
        if answers.held_out is not None:
            yield "trainer.num_generations_eval", 1, "completions of a prompt of data.validation"
        yield "trainer.max_completion_length", *_completion(answers)
    if answers.stage == "sft":
        yield "trainer.learning_rate", 1e-4, "usual for LoRA; 2e-4 for few rows"
    else:
        yield "trainer.learning_rate", 1e-5, "a tenth of what LoRA takes for sft"
    if answers.stage == "dpo":
        yield "trainer.beta", 0.1, "how much the model may leave its reference; smaller: more"
    yield "trainer.per_device_train_batch_size", rows, "more if the memory has room"
    why = f"{counted(step, 'row')} a step on one device"
    yield "trainer.gradient_accumulation_steps", usual, why
    yield "trainer.seed", 42, "of the adapter, the order of rows and dropout"
    if answers.held_out is not None:
        yield EVALUATED, rows, "of data.validation at once; left out: 8"


def _steps(answers: Answers, trainer: Mapping[str, Any], step: int) -> str:
    """How many steps an epoch is if they are few, else what else the section takes.

    Args:
        trainer: its overrides.
        step: rows, or completions, of a step.
    """
    if trainer.get("max_steps", -1) > 0:
        return "not used: trainer.max_steps ends the run"
    size = step // trainer.get("num_generations", GROUP) if answers.stage == "grpo" else step
    share = answers.share_held_out
    rows = len(answers.rows)
    trained = rows - (max(1, round(share * rows)) if share else 0)
    steps = math.ceil(trained / max(1, size))
    if steps >= FEW_STEPS * (1 - HELD_OUT):
        return f"trainer takes any field of TRL's {STAGES[answers.stage].config}"
    few = in_number("which {change} little; more epochs do", steps)
    return f"{counted(steps, 'step')} of {counted(trained, 'row')}, {few}"


def _reward(row: Row) -> str:
    """The reward that reads a field of a row."""
    return "code" if "tests" in row else "exact_match"


def _completion(answers: Answers) -> tuple[int, str]:
    """The longest completion in tokens: by the rows' answers, unless the model may reason first."""
    prompts = (row["prompt"] for row in answers.rows)
    field = READ_BY["exact_match"]
    texts = [str(row[field]) for row in answers.rows if row.get(field) is not None]
    if not texts or any(isinstance(prompt, list) for prompt in prompts):
        return LONG_COMPLETION, "tokens; data.max_length has prompt and answer"
    tokenizer = load_tokenizer(local_folder(answers.checkpoint, weights=False))
    longest = max(len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"])
    tokens = min(max(SHORT_COMPLETION, 2 ** math.ceil(math.log2(4 * longest))), LONG_COMPLETION)
    return tokens, f"tokens; the longest answer of these rows has {longest}"


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested mappings."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


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


def check_method(name: str) -> None:
    """Refuse a preset that does not exist."""
    if name not in PRESETS:
        raise RecipeError(f"--method {name}: unknown{did_you_mean(name, PRESETS)}")


def write_starter(answers: Answers, output: Path, gpu: float | None = None) -> str:
    """Write the recipe to a new file if a run would accept it; return what does not fit, or "".

    ``gpu``: GiB of the GPU that it is for; default: this machine's.
    """
    refuse_existing(output)
    tree = answers.tree(yaml.safe_load(starter(answers)))
    recipe = recipe_from_tree(tree)
    if recipe.evaluation is not None:
        load_suite(recipe.evaluation.suite)
    device: Device = "cuda" if gpu or torch.cuda.is_available() else "cpu"
    gib = gpu or machine_bytes() / GIB
    values = tree.values
    if answers.preset == "none":  # whose second run has to fit as well
        values = merge_mappings(values, load_tree([], losses(answers.stage)).values)
    with terminal().announced("init"):
        user_keys = [key for key, _ in _leaves(answers.overridden.values)]
        changes, fits = memory_changes(values, gib, device, user_keys)
    sized = [(key, value, f"{gib:.3g} GiB: {why}") for key, value, why in changes]
    write_new(output, starter(answers, sized))
    return (
        ""
        if fits
        else (f"a step does not fit {gib:.3g} GiB with it; docs/memory.md has what else helps")
    )
