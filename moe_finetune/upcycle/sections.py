"""The sections of an upcycle recipe, with the paper's defaults."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from moe_finetune.recipe.method import Method, resolve_method
from moe_finetune.recipe.section import Section
from moe_finetune.recipe.sections import LoraSection


class PretrainSection(Section):
    """A small Llama to pretrain; head size 32 (64 from a hidden size of 512)."""

    vocab_size: int = Field(default=1024, ge=300, description="vocabulary of the new tokenizer")
    hidden_size: int = Field(default=128, ge=32, multiple_of=32, description="hidden size")
    intermediate_size: int = Field(default=256, ge=8, description="width of the feed-forwards")
    layers: int = Field(default=4, ge=1, description="number of decoder layers")
    seed: int = Field(default=0, description="seed of the random weights")
    trainer: dict[str, Any] = Field(default={}, description="fields of SFTConfig")


class DenseSection(Section):
    """The dense model: a checkpoint, or a small model that is first pretrained on the texts."""

    path: str | None = Field(default=None, min_length=1, description="folder or hub id")
    revision: str | None = Field(default=None, description="branch, tag or commit on the hub")
    dtype: Literal["bfloat16", "float32"] = Field(
        default="bfloat16", description="type of the stored weights"
    )
    pretrain: PretrainSection | None = None


class TextSection(Section):
    """The texts: a source for each category, or the built-in corpus of this Python's files."""

    categories: dict[str, str | list[str]] | None = Field(
        default=None, description="category -> its source or sources, rows of `text`"
    )
    corpus: Literal["python"] | None = Field(
        default=None, description="texts from the files of this Python installation"
    )
    max_length: int = Field(default=2048, ge=8, description="tokens in a training row")
    limit: int | None = Field(
        default=None, ge=10, description="maximum number of texts per category; default: all"
    )
    seed: int = Field(default=0, description="seed of the split into train, validation and test")


class ClusterSection(Section):
    """How categories become the data of N experts."""

    count: int = Field(default=8, ge=2, description="number of clusters, and of experts")
    pinned: dict[str, int] = Field(default={}, description="category -> cluster, from 0")
    exclusive: bool = Field(
        default=False, description="clusters with pinned categories get no others"
    )
    sizes: list[int] | None = Field(
        default=None,
        min_length=2,
        max_length=2,
        description="fewest and most categories of a cluster; default: equal, or as pinned",
    )
    table: str | None = Field(
        default=None, description="an existing table of these texts, which determines the clusters"
    )
    restarts: int = Field(
        default=16, ge=1, description="starts of the clustering; the best result is kept"
    )
    seed: int = Field(default=0, description="seed of the clustering")

    @property
    def bounds(self) -> tuple[int, int] | None:
        return (self.sizes[0], self.sizes[1]) if self.sizes is not None else None


class ExpertSection(Section):
    """Continued training of the dense model on each cluster, or ready-made checkpoints."""

    checkpoints: list[str] | None = Field(
        default=None,
        description="one per cluster, in order; needs `clusters.table`, or every category pinned",
    )
    lora: LoraSection | None = Field(default=None, description="default: the whole model")
    trainer: dict[str, Any] = Field(default={}, description="fields of SFTConfig")
    processes: int = Field(default=1, ge=1, description="experts that are trained at the same time")


class MergeSection(Section):
    """The MoE that the experts become."""

    top_k: int = Field(default=2, ge=1, description="experts per token")
    router_std: float = Field(
        default=0.02, ge=0, description="standard deviation of the random routers"
    )


class RouterSection(Section):
    """Training of only the routers, with supervised routing."""

    trainer: dict[str, Any] = Field(default={}, description="fields of SFTConfig")


class ArmSection(Section):
    """A model to fine-tune and compare; ``trainer`` overrides keys of ``finetune.trainer``."""

    model_config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)

    start: Literal["dense", "merged", "router"] = Field(description="the model that is fine-tuned")
    label: str | None = Field(default=None, description="name in tables; default: the key")
    method: Method = Field(default=Method(), description="losses, as in a training recipe")
    expert_steps: bool = Field(
        default=False, description="from `dense`: trained for an expert's steps as well"
    )
    trainer: dict[str, Any] = Field(
        default={}, description="fields of SFTConfig over `finetune.trainer`"
    )
    router_learning_rate: float | None = Field(
        default=None, gt=0, description="learning rate of the routers; default: the trainer's"
    )

    @field_validator("method", mode="before")
    @classmethod
    def _resolve(cls, value: Any) -> Any:
        return value if isinstance(value, Method) else resolve_method(value)

    @model_validator(mode="after")
    def _fits(self) -> ArmSection:
        if self.start == "dense" and self.method.terms:
            raise ValueError("an arm that starts from 'dense' has no router; remove its terms")
        if self.expert_steps and self.start != "dense":
            raise ValueError(
                "expert_steps: only valid with start: dense, because the experts of "
                f"'{self.start}' are already trained; leave it out"
            )
        if self.start == "dense" and self.router_learning_rate is not None:
            raise ValueError("router_learning_rate: an arm that starts from 'dense' has no router")
        if self.method.bias_update is not None:
            raise ValueError(
                "method.bias_update: these checkpoints cannot store a routing bias; leave it out"
            )
        return self


class FinetuneSection(Section):
    """The last stage, for every arm: the whole model, or LoRA that is merged afterwards."""

    lora: LoraSection | None = Field(default=None, description="default: the whole model")
    trainer: dict[str, Any] = Field(default={}, description="fields of SFTConfig")


class JudgementSection(Section):
    """P3's Table 2: few-shot yes-or-no questions.

    Without ``file`` the questions are made from the texts: does one piece continue the other? Rows
    of a file have ``question`` and ``answer`` (true or false), and may have a ``category``.
    """

    file: str | None = Field(
        default=None, description="rows of `question` and `answer`; default: made from the texts"
    )
    shots: int = Field(default=5, ge=0, description="solved questions before each")
    language: Literal["en", "ja"] = Field(
        default="en", description="language of the prompts and answers"
    )
    items: int = Field(default=200, ge=2, description="most questions")
    piece: int = Field(default=32, ge=2, description="tokens per piece of a generated question")


class EvaluationSection(Section):
    """The measurements of every arm."""

    texts: int | None = Field(
        default=None,
        ge=1,
        description="number of texts measured per category and split; default: all",
    )
    tokens_per_batch: int = Field(default=4096, ge=1, description="tokens in one forward pass")
    judgement: JudgementSection | None = JudgementSection()
    passages: int = Field(
        default=4, ge=0, description="number of texts that the page colors by expert"
    )
    passage_layer: int | None = Field(
        default=None, ge=0, description="layer whose experts color them; default: the middle one"
    )
