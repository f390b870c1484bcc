"""Texts by category, split 8:1:1 and tokenized; the ids are memory-mapped.

Splits are drawn text by text within each category, so that every category is in all three. A text's
ids begin with the tokenizer's prefix (a BOS token, if the model expects one) and end with the
end-of-text token, if there is one. Training, perplexity, counts and questions use these ids.

Shape legend: T texts, C categories, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from moe_finetune.errors import CheckpointError, DataError
from moe_finetune.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from datasets import Dataset

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
TOKENS_FILE = "tokens.arrow"
AT_ONCE = 32
"""Texts tokenized together; the tokenizer needs about thirty times their memory."""


class SizedTexts(Protocol):
    """Texts that can be iterated more than once."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[str]: ...


def splits_of(count: int, seed: int) -> np.ndarray:
    """Split of each of ``count`` texts, ``(count,)`` int8 indices into :data:`SPLITS`.

    Shares are 8:1:1, with at least one text in each split; needs three texts or more.
    """
    tenth = max(1, round(count / 10))
    order = np.random.default_rng([seed, count]).permutation(count)
    split_T = np.zeros(count, np.int8)
    split_T[order[:tenth]] = SPLITS.index("test")
    split_T[order[tenth : 2 * tenth]] = SPLITS.index("validation")
    return split_T


def opening_ids(tokenizer: Tokenizer) -> list[int]:
    """The ids that the tokenizer puts before a sequence: ``[bos]``, or none."""
    plain: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    complete: list[int] = tokenizer("a")["input_ids"]
    for start in range(len(complete) - len(plain) + 1):
        if complete[start : start + len(plain)] == plain:
            return complete[:start]
    raise DataError(
        f"dense: its tokenizer turns 'a' into {plain} and, with special tokens, into {complete}; "
        "expected the same ids between them"
    )


@dataclass(frozen=True)
class Texts:
    """Tokenized texts: a dataset of ids, with each text's number of ids, split and category.

    ``split_T`` are indices into :data:`SPLITS`, ``category_T`` into ``categories``.
    """

    categories: tuple[str, ...]
    rows: Dataset
    lengths_T: np.ndarray
    split_T: np.ndarray
    category_T: np.ndarray

    @classmethod
    def tokenize(
        cls, categories: Mapping[str, SizedTexts], tokenizer: Tokenizer, seed: int, folder: Path
    ) -> Texts:
        """Tokenize into ``folder``, in batches of texts, and open the result."""
        from datasets import ClassLabel, Features, List, Value
        from datasets.arrow_writer import ArrowWriter

        opening = opening_ids(tokenizer)
        ending = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        features = Features(
            {
                "input_ids": List(Value("int32")),
                "category": ClassLabel(names=list(categories)),
                "split": ClassLabel(names=list(SPLITS)),
            }
        )
        with ArrowWriter(path=str(folder / TOKENS_FILE), features=features) as writer:
            for category, texts in categories.items():
                remaining, splits = iter(texts), iter(splits_of(len(texts), seed).tolist())
                while batch := list(islice(remaining, AT_ONCE)):
                    encoded = tokenizer(batch, add_special_tokens=False)["input_ids"]
                    for ids, split in zip(encoded, splits, strict=False):
                        row = {"input_ids": opening + ids + ending, "split": split}
                        writer.write(row | {"category": category})
            writer.finalize()
        return cls.load(folder)

    @classmethod
    def load(cls, folder: Path) -> Texts:
        """Open what :meth:`tokenize` wrote; its ids stay in their file."""
        import pyarrow.compute as pc
        from datasets import Dataset

        try:
            rows = Dataset.from_file(str(folder / TOKENS_FILE))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{folder}: the tokenized texts cannot be read ({error}); remove the folder and "
                "run the stage 'dense' again"
            ) from None
        labels = rows.select_columns(["split", "category"]).with_format("numpy")[:]
        return cls(
            tuple(rows.features["category"].names),
            rows.select_columns(["input_ids"]).with_format("numpy"),
            pc.list_value_length(rows.data.column("input_ids")).to_numpy().astype(np.int64),
            labels["split"],
            labels["category"],
        )

    def numbers(self, split: Split, category: int) -> np.ndarray:
        """Indices of a category's texts in a split, in the order of the sources."""
        chosen_T = (self.category_T == category) & (self.split_T == SPLITS.index(split))
        return np.flatnonzero(chosen_T)

    def ids(self, numbers: Iterable[int], length: int | None = None) -> Iterator[np.ndarray]:
        """Yield the ids of texts, or their first ``length`` ids, read in batches."""
        # A given fingerprint avoids hashing the indices.
        chosen = self.rows.select(list(numbers), new_fingerprint="chosen")
        for batch in chosen.iter(AT_ONCE):
            yield from (ids[:length] for ids in batch["input_ids"])

    def tokens(self, split: Split, category: int) -> int:
        """Number of ids in a category's split."""
        return int(self.lengths_T[self.numbers(split, category)].sum())

    def windows(
        self, split: Split, category: int, length: int, limit: int | None = None
    ) -> list[np.ndarray]:
        """The first ``length`` ids of each of the :meth:`measurable` texts, in memory."""
        return list(self.ids(self.measurable(split, category, limit), length))

    def measurable(self, split: Split, category: int, limit: int | None = None) -> np.ndarray:
        """Indices of a category's texts with two ids or more, evenly thinned to ``limit``."""
        numbers = self.numbers(split, category)
        numbers = numbers[self.lengths_T[numbers] > 1]
        if limit is not None and len(numbers) > limit:
            numbers = numbers[np.linspace(0, len(numbers) - 1, limit).round().astype(int)]
        return numbers

    def blocks(self, categories: Iterable[int], length: int, seed: int, file: Path) -> Dataset:
        """Training texts of some categories, shuffled and concatenated, in rows of ``length`` ids.

        The rows are memory-mapped from ``file``. The same arguments give the same rows.
        """
        from datasets import Dataset, Features, List, Value
        from datasets.arrow_writer import ArrowWriter

        chosen = list(categories)
        self.check_rows(chosen, length)
        numbers = np.concatenate([self.numbers("train", category) for category in chosen])
        order = np.random.default_rng(seed).permutation(len(numbers))
        rest = np.zeros(0, np.int32)
        features = Features({"input_ids": List(Value("int32"))})
        with ArrowWriter(path=str(file), features=features) as writer:
            for ids in self.ids(numbers[order]):
                rest = np.concatenate([rest, ids])
                whole = len(rest) // length * length
                for row in rest[:whole].reshape(-1, length):
                    writer.write({"input_ids": row})
                rest = rest[whole:]
            writer.finalize()
        return Dataset.from_file(str(file))

    def check_rows(self, categories: Sequence[int], length: int) -> None:
        """Raise DataError if the categories' training texts are shorter than one row."""
        tokens = sum(self.tokens("train", category) for category in categories)
        if tokens < length:
            names = ", ".join(self.categories[category] for category in categories) or "no category"
            raise DataError(
                f"texts: {names}: {tokens} training tokens are fewer than one row of "
                f"texts.max_length {length}; add texts or lower it"
            )

    def counts(self, vocabulary: int) -> np.ndarray:
        """Occurrences of every token id in each category's training texts: ``(C, V)`` int64."""
        counts_CV = np.zeros((len(self.categories), vocabulary), np.int64)
        for category, counts_V in enumerate(counts_CV):
            for ids in self.ids(self.numbers("train", category)):
                np.add.at(counts_V, ids, 1)
        return counts_CV


def check_vocabulary(tokenizer: Tokenizer, vocabulary: int, folder: Path) -> None:
    """Refuse a tokenizer with ids beyond the model's embedding."""
    last = max(tokenizer.get_vocab().values())
    if last >= vocabulary:
        raise CheckpointError(
            f"{folder}: its tokenizer has ids up to {last}, but the model's vocab_size is "
            f"{vocabulary}; resize the model's embedding, or use the model's tokenizer"
        )
