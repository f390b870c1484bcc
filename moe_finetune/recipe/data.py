"""The ``data:`` section of a recipe: where the examples are, and how they become tokens."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from moe_finetune.io.split_files import has_validation
from moe_finetune.recipe.section_base import Section

Format = Literal["auto", "messages", "prompt_completion", "text"]
SECTIONS: Any = Field(default=None, description="default: that of the `data` section")


class DataSource(Section):
    """One of several sources, with its own columns; unset keys default to the section's.

    ``where`` keeps rows by a field's values; ``words`` replaces a field's number by the word at
    that index, such as a class label; ``limit`` counts the rows after ``where``.
    """

    path: str = Field(min_length=1, description="file, folder or hub id of a dataset")
    format: Format | None = SECTIONS
    columns: dict[str, str] | None = SECTIONS
    template: dict[str, str] | None = SECTIONS
    split: str | None = Field(default=None, description="split of a hub dataset")
    limit: int | None = Field(default=None, ge=1, description="number of rows to draw at random")
    where: dict[str, list[str | int]] = Field(
        default={}, description="field -> values of kept rows"
    )
    words: dict[str, list[str]] = Field(default={}, description="field -> words for its numbers")

    @model_validator(mode="after")
    def _agree(self) -> DataSource:
        if self.columns and self.template:
            raise ValueError("columns and template cannot be combined; keep one of them")
        return self


Paths = str | list[str | DataSource]


class DataSection(Section):
    """The examples, and how they become tokens."""

    train: Paths = Field(description="training data: file, folder, hub id, or a list of them")
    validation: float | Paths | None = Field(
        default=None,
        description="validation data, or the share of `train` to hold out, such as 0.1; default: "
        "validation files of a folder `train`",
    )
    format: Format = Field(default="auto", description="`auto` detects it from the rows")
    columns: dict[str, str] | None = Field(
        default=None, description="our field -> the file's: {prompt: question, completion: answer}"
    )
    template: dict[str, str] | None = Field(
        default=None, description='our field from theirs: {prompt: "Q: {question}\\nA:", ...}'
    )
    chat_template: str | None = Field(
        default=None, description="chatml, plain, training (TRL's) or a file; default: the model's"
    )
    turns: Literal["all", "each"] = Field(
        default="all", description="one example per conversation, or one per answer"
    )
    max_length: int = Field(default=2048, ge=2, le=2**24, description="longest row in tokens")
    overlong: Literal["truncate", "drop", "error"] = Field(
        default="truncate", description="what happens to rows longer than `max_length`"
    )
    malformed: Literal["error", "drop"] = Field(
        default="error", description="what happens to rows without what training needs"
    )
    packing: bool = Field(default=False, description="pack several rows into one of `max_length`")
    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = Field(
        default="bfd", description="as in TRL; with `wrapped`, texts of a row attend to each other"
    )
    completion_only_loss: bool | None = Field(
        default=None, description="learn only completions; default: where there are some"
    )
    split: str = Field(default="train", description="split of a hub dataset")
    limit: int | None = Field(default=None, ge=1, description="rows to draw from all sources")
    seed: int | None = Field(
        default=None, ge=0, lt=2**32, description="of the rows' order; default: trainer.seed"
    )
    num_proc: int | None = Field(default=None, ge=1, description="processes that prepare the data")

    @field_validator("validation", mode="before")
    @classmethod
    def _is_share(cls, value: Any) -> Any:
        if isinstance(value, int | float) and not 0 < value < 1:
            raise ValueError("a share of the rows to hold out must be between 0 and 1, such as 0.1")
        return value

    @property
    def validation_sources(self) -> Paths | None:
        """Where validation rows come from: ``train`` if a share of it is held out."""
        return self.train if isinstance(self.validation, float) else self.validation

    @model_validator(mode="after")
    def _validation_of_folders(self) -> DataSection:
        """Validate on the validation files of a folder, also of ``train``'s if none are named."""
        if isinstance(self.validation, float):
            return self
        named = self.train if self.validation is None else self.validation
        if self.split == "train":
            sources = [DataSource(path=source) if isinstance(source, str) else source
                       for source in (named if isinstance(named, list) else [named])]  # fmt: skip
            folders = [s.split is None and has_validation(s.path) for s in sources]
            split = {"split": "validation"} | ({} if self.validation else {"limit": None})
            read: list[str | DataSource] = [
                source.model_copy(update=split) if folder else source
                for source, folder in zip(sources, folders, strict=True)
                if folder or self.validation
            ]
            self.validation = read if any(folders) else self.validation
        return self

    def for_pretraining(self) -> DataSection:
        """The section with pretraining's defaults for unset keys: texts, cut to rows, packed."""
        usual = {"format": "text", "packing": True, "packing_strategy": "bfd_split"}
        unset = {key: value for key, value in usual.items() if key not in self.model_fields_set}
        return DataSection.model_validate({**self.model_dump(exclude_unset=True), **unset})
