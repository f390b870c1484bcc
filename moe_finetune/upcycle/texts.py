"""Texts by category, split 8:1:1 and tokenized; their ids stay in a file and are read in parts.

Splits are drawn text by text within each category, so that every category is in all three. A text's
ids begin as its tokenizer begins a sequence (a BOS token, where the model expects one) and end with
the end-of-text token where there is one. Training, perplexity, counts and questions use these ids.

Shape legend: T texts, C categories, V vocabulary.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from moe_finetune.errors import CheckpointError, DataError
from moe_finetune.io.json_file import parse_json

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
TOKENS_FILE, LENGTHS_FILE, INDEX_FILE = "tokens.bin", "lengths.npy", "texts.json"
BATCH_CHARACTERS = 1 << 18
"""Characters tokenized at a time: the tokenizer takes some thirty times their memory."""
SCAN_IDS = 2 << 20
"""Ids counted at a time."""
Item = TypeVar("Item", str, np.ndarray)


class SizedTexts(Protocol):
    """Texts that can be iterated more than once."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[str]: ...


def splits_of(count: int, seed: int) -> np.ndarray:
    """Split of each of ``count`` texts, ``(count,)`` int8 places in :data:`SPLITS`.

    Eight, one and one tenths, at least one in each (three texts or more), drawn with ``seed``.
    """
    tenth = max(1, round(count / 10))
    order = np.random.default_rng([seed, count]).permutation(count)
    split_T = np.zeros(count, np.int8)
    split_T[order[:tenth]] = SPLITS.index("test")
    split_T[order[tenth : 2 * tenth]] = SPLITS.index("validation")
    return split_T


def training_texts(categories: Mapping[str, SizedTexts], seed: int) -> Iterator[str]:
    """The texts of the training split, category by category."""
    for texts in categories.values():
        yield from (t for t, s in zip(texts, splits_of(len(texts), seed), strict=True) if s == 0)


def opening_ids(tokenizer: Any) -> list[int]:
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
    """Tokenized texts: categories, and where each text's ids are in the file of tokens.

    ``starts_T1`` has one more entry than texts, the end of the last; ``split_T`` are places in
    :data:`SPLITS` and ``category_T`` in ``categories``.
    """

    categories: tuple[str, ...]
    folder: Path
    starts_T1: np.ndarray
    split_T: np.ndarray
    category_T: np.ndarray

    @classmethod
    def tokenize(
        cls, categories: Mapping[str, SizedTexts], tokenizer: Any, seed: int, folder: Path
    ) -> Texts:
        """Tokenize into ``folder``, some texts at a time, and open the result."""
        opening = opening_ids(tokenizer)
        ending = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        lengths: list[np.ndarray] = []
        with (folder / TOKENS_FILE).open("wb") as stream:
            for batch in _batches(chain.from_iterable(categories.values()), BATCH_CHARACTERS):
                encoded = tokenizer(batch, add_special_tokens=False, return_attention_mask=False)
                rows = [np.array(opening + ids + ending, "<i4") for ids in encoded["input_ids"]]
                lengths.append(np.array([len(row) for row in rows], np.int64))
                np.concatenate(rows).tofile(stream)
        np.save(folder / LENGTHS_FILE, np.concatenate(lengths))
        counts = {name: len(texts) for name, texts in categories.items()}
        index = {"categories": counts, "split_seed": seed, "opening": opening, "ending": ending}
        text = json.dumps(index, indent=2, ensure_ascii=False) + "\n"
        (folder / INDEX_FILE).write_text(text, encoding="utf-8")
        return cls.load(folder)

    @classmethod
    def load(cls, folder: Path) -> Texts:
        """Open what :meth:`tokenize` wrote; its ids stay in their file."""
        try:
            index = parse_json((folder / INDEX_FILE).read_bytes())
            lengths_T = np.load(folder / LENGTHS_FILE, allow_pickle=False)
            counts = list(index["categories"].values())
            splits = [splits_of(count, index["split_seed"]) for count in counts]
            starts_T1 = np.concatenate([[0], np.cumsum(lengths_T)])
            size = (folder / TOKENS_FILE).stat().st_size
            if sum(counts) != len(lengths_T) or size != 4 * starts_T1[-1]:
                raise ValueError(f"{size} bytes of tokens, expected {4 * starts_T1[-1]}")
            return cls(
                tuple(index["categories"]),
                folder,
                starts_T1,
                np.concatenate(splits),
                np.repeat(np.arange(len(counts), dtype=np.int32), counts),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{folder}: the tokenized texts cannot be read ({error}); remove the folder and "
                "run the stage 'dense' again"
            ) from None

    @property
    def lengths_T(self) -> np.ndarray:
        return np.diff(self.starts_T1)

    def numbers(self, split: Split, category: int) -> np.ndarray:
        """Numbers of a category's texts in a split, in the order of the sources."""
        chosen_T = (self.category_T == category) & (self.split_T == SPLITS.index(split))
        return np.flatnonzero(chosen_T)

    def ids(self, numbers: Iterable[int], length: int | None = None) -> Iterator[np.ndarray]:
        """Ids of some texts, or their first ``length``, read one text at a time."""
        with (self.folder / TOKENS_FILE).open("rb", buffering=0) as stream:
            for index in numbers:
                start, end = (int(offset) for offset in self.starts_T1[index : index + 2])
                end = end if length is None else min(end, start + length)
                yield np.frombuffer(os.pread(stream.fileno(), 4 * (end - start), 4 * start), "<i4")

    def tokens(self, split: Split, category: int) -> int:
        """Number of ids in a category's split."""
        return int(self.lengths_T[self.numbers(split, category)].sum())

    def windows(
        self, split: Split, category: int, length: int, limit: int | None = None
    ) -> list[np.ndarray]:
        """The first ``length`` ids of each of :meth:`measurable` texts, in memory."""
        return list(self.ids(self.measurable(split, category, limit), length))

    def measurable(self, split: Split, category: int, limit: int | None = None) -> np.ndarray:
        """Numbers of a category's texts that have two ids or more; evenly thinned."""
        numbers = self.numbers(split, category)
        numbers = numbers[self.lengths_T[numbers] > 1]
        if limit is not None and len(numbers) > limit:
            numbers = numbers[np.linspace(0, len(numbers) - 1, limit).round().astype(int)]
        return numbers

    def blocks(self, categories: Iterable[int], length: int, seed: int, file: Path) -> np.ndarray:
        """Training texts of some categories in a random order, laid end to end: ``(rows, length)``.

        They are written to ``file`` and mapped from there, so that a row is in memory only while it
        is read. The same arguments give the same file.

        Raises:
            DataError: together they are shorter than one row.
        """
        chosen = list(categories)
        self.check_rows(chosen, length)
        numbers = np.concatenate([self.numbers("train", category) for category in chosen])
        order = np.random.default_rng(seed).permutation(len(numbers))
        with file.open("wb") as stream:
            for ids in self.ids(numbers[order]):
                stream.write(ids.data)
            rows = stream.tell() // (4 * length)
        return np.memmap(file, "<i4", "r", shape=(rows, length))

    def check_rows(self, categories: Sequence[int], length: int) -> None:
        """Raise DataError where the categories' training texts are shorter than one row."""
        tokens = sum(self.tokens("train", category) for category in categories)
        if tokens < length:
            names = ", ".join(self.categories[c] for c in categories) or "no category"
            raise DataError(
                f"texts: {names}: {tokens} training tokens are less than one row of "
                f"texts.max_length {length}; add texts or lower it"
            )

    def counts(self, vocabulary: int) -> np.ndarray:
        """Occurrences of every token id in each category's training texts: ``(C, V)`` int64."""
        counts_CV = np.zeros((len(self.categories), vocabulary), np.int64)
        for category, counts_V in enumerate(counts_CV):
            for batch in _batches(self.ids(self.numbers("train", category)), SCAN_IDS):
                counts_V += np.bincount(np.concatenate(batch), minlength=vocabulary)
        return counts_CV


def _batches(items: Iterable[Item], limit: int) -> Iterator[list[Item]]:
    """Lists of consecutive items; a list ends when the items' lengths reach ``limit``."""
    batch: list[Item] = []
    size = 0
    for item in items:
        batch.append(item)
        size += len(item)
        if size >= limit:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def check_vocabulary(tokenizer: Any, vocabulary: int, folder: Path) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for.

    Raises:
        CheckpointError: an id of ``vocabulary`` or more.
    """
    last = max(tokenizer.get_vocab().values())
    if last >= vocabulary:
        raise CheckpointError(
            f"{folder}: its tokenizer has ids up to {last}, and the model's vocab_size is "
            f"{vocabulary}; resize the model's embedding, or give the tokenizer that it was "
            "trained with"
        )
