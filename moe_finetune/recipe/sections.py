"""The sections of a recipe, and their keys. The ``method:`` section is in ``method.py``."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from moe_finetune.recipe.family import FamilySection
from moe_finetune.recipe.lora import LoraSection as LoraSection
from moe_finetune.recipe.section import Section

# transformers' own; it would also take a hub id, and fetch code from there.
Attention = Literal[
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "flex_attention",
]


class ModelSection(Section):
    """The checkpoint to start from.

    ``init: random`` takes only config and tokenizer from it, lays ``config`` over the former and
    trains a model from scratch, without an adapter.
    """

    path: str = Field(min_length=1, description="folder or hub id")
    dtype: Literal["bfloat16", "float32"] = Field(
        default="bfloat16", description="type of the weights and of the merged checkpoint"
    )
    quantization: Literal["none", "nf4", "int8"] = Field(
        default="none", description="how frozen weights are held while an adapter trains"
    )
    revision: str | None = Field(default=None, description="of the hub")
    tokenizer: str | None = Field(default=None, description="folder or hub id; default: path")
    attn_implementation: Attention | None = Field(
        default=None, description="default: transformers' own choice"
    )
    experts_kernel: Literal["auto", "grouped", "loop"] = Field(
        default="auto", description="one product for all experts, as on GPUs, or one for each"
    )
    offload: Literal["none", "experts"] = Field(
        default="none",
        description="experts: frozen stacks wait in the host's memory, two layers on the GPU",
    )
    init: Literal["checkpoint", "random"] = Field(
        default="checkpoint", description="`random`: from scratch, with `lora: null`"
    )
    config: dict[str, Any] = Field(default={}, description="keys of config.json to change")
    family: FamilySection | None = Field(
        default=None, description="facts of a model type that the toolkit does not know"
    )


class ParallelSection(Section):
    """What the processes that a launcher starts share; each has batches of its own all the same."""

    experts: int | Literal["all"] = Field(
        default=1,
        description="ranks that hold the routed experts together, each its part; `all` of them",
    )

    @field_validator("experts")
    @classmethod
    def _some(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"must be 1 or more, or 'all', not {value}")
        return value


class RouterSection(Section):
    """How the routers learn: all weights, through LoRA, or not at all.

    ``replay``, of stage grpo: a completion is trained with the experts that its tokens were given
    when it was sampled, weighted by the present router.
    """

    train: Literal["full", "lora", "frozen"] = Field(
        default="full", description="all weights of the routers, LoRA on them, or nothing"
    )
    replay: bool = Field(
        default=False, description="of stage grpo: train with the experts of the rollout"
    )


class DataSource(Section):
    """One of several sources, with columns of its own; what is unset is the section's.

    ``where`` keeps rows by a field's values; ``words`` turns a field's number into the word at that
    place, as a label of a classification task; ``limit`` counts the rows that are kept.
    """

    path: str = Field(min_length=1, description="file, folder or hub id")
    format: Literal["auto", "messages", "prompt_completion", "text"] | None = Field(
        default=None, description="default: the section's"
    )
    columns: dict[str, str] | None = Field(default=None, description="default: the section's")
    template: dict[str, str] | None = Field(default=None, description="default: the section's")
    split: str | None = Field(default=None, description="of a data set of the hub")
    limit: int | None = Field(default=None, ge=1, description="rows to draw, by the seed")
    where: dict[str, list[str | int]] = Field(
        default={}, description="field -> the values whose rows are kept"
    )
    words: dict[str, list[str]] = Field(
        default={}, description="field -> the words that its numbers stand for"
    )

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

    train: Paths = Field(description="file, folder, hub id, or a list of them")
    validation: Paths | None = Field(default=None, description="the same; measured while training")
    format: Literal["auto", "messages", "prompt_completion", "text"] = Field(
        default="auto", description="`auto` looks at the rows"
    )
    columns: dict[str, str] | None = Field(
        default=None, description="our field -> the file's: {prompt: question, completion: answer}"
    )
    template: dict[str, str] | None = Field(
        default=None, description='our field from theirs: {prompt: "Q: {question}\\nA:", ...}'
    )
    chat_template: str | None = Field(
        default=None, description="chatml, plain, training (TRL's), or a Jinja file"
    )
    turns: Literal["all", "each"] = Field(
        default="all",
        description="one example of a conversation, or one of each of its answers",
    )
    ignore: list[str] = Field(
        default=[],
        description="columns, fields of turns and kinds of content to leave out: [images, name]",
    )
    date: str | None = Field(
        default=None,
        description="the day that chat templates write; default: that of the first preparation",
    )
    max_length: int = Field(default=2048, ge=2, le=2**24, description="tokens of a row")
    overlong: Literal["truncate", "drop", "error"] = Field(
        default="truncate", description="what happens to a longer row"
    )
    packing: bool = Field(default=False, description="several rows in one of `max_length`")
    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = Field(
        default="bfd", description="as in TRL; in rows of `wrapped` texts see each other"
    )
    completion_only_loss: bool | None = Field(
        default=None, description="default: on where there is a completion"
    )
    split: str = Field(default="train", description="of a data set of the hub")
    limit: int | None = Field(
        default=None, ge=1, description="rows to draw from all sources together, by the seed"
    )
    seed: int | None = Field(default=None, description="order of the rows; default: trainer.seed")
    num_proc: int | None = Field(default=None, ge=1, description="processes that prepare the data")

    @field_validator("date", mode="before")
    @classmethod
    def _day(cls, value: Any) -> Any:
        if value is None:
            return None
        try:
            return datetime.date.fromisoformat(str(value)).isoformat()
        except ValueError:
            raise ValueError(f"wanted a day such as 2026-11-23, got {value!r}") from None


class RewardSection(Section):
    """A reward of reinforcement: one by name, or a function of the user's own Python file."""

    name: str | None = Field(default=None, description="exact_match, boxed or code")
    file: str | None = Field(default=None, description="a Python file of your own")
    function: str = Field(default="reward", description="of that file")
    weight: float = Field(
        default=1.0, ge=-1e6, le=1e6, allow_inf_nan=False, description="of this reward in the sum"
    )

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one(self) -> RewardSection:
        if (self.name is None) == (self.file is None):
            raise ValueError("wanted either a name or a file")
        return self


class ExportSection(Section):
    """What is written after training. ``verify`` defaults to ``merge``."""

    merge: bool = Field(default=True, description="write `merged/`")
    verify: bool | None = Field(
        default=None, description="compare it with base + adapter; default: as `merge`"
    )

    @model_validator(mode="after")
    def _verify(self) -> ExportSection:
        if self.verify is None:
            self.verify = self.merge
        return self


class EvaluationSection(Section):
    """What the merged checkpoint is tested on, and, with ``every``, the model on its way there.

    The states on the way are kept beside the training checkpoints, whatever becomes of those, and
    scored after training; then their weights are deleted.
    """

    suite: str = Field(min_length=1, description="name or file of a suite")
    backend: Literal["vllm", "hf"] = Field(default="vllm", description="what answers")
    only: list[str] | None = Field(
        default=None, min_length=1, description="labels of the suite's tasks"
    )
    limit: int | None = Field(default=None, ge=1, description="items of each task")
    every: int | None = Field(
        default=None, ge=1, description="steps between scores; default: at the end alone"
    )
    data_dir: str | None = Field(default=None, description="folder of local task data")
    vllm: dict[str, Any] = Field(default={}, description="engine arguments")


class NumericsSection(Section):
    """What happens when numbers go wrong, and whether every operation must repeat exactly.

    ``max_violation`` and ``dead_experts`` are limits of a router that has not collapsed, see
    :class:`moe_finetune.training.numerics.CollapseWatch`; ``patience`` counts logs.
    """

    on_nan: Literal["stop", "skip"] = Field(
        default="stop",
        description="when a loss or gradient is not finite: end the run, or leave the step out",
    )
    max_violation: float | None = Field(
        default=None, gt=0, description="default: 0.75 x (experts / selected - 1)"
    )
    dead_experts: float = Field(default=0.5, gt=0, le=1, description="share of the experts")
    patience: int = Field(
        default=5, ge=1, description="logs beyond a limit before the run is stopped"
    )
    deterministic: bool = Field(
        default=False, description="refuse operations that do not repeat to the last bit"
    )
