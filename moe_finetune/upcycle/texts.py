"""Texts by category, split 8:1:1 and tokenized, kept in one safetensors file.

A text is one row of its source. Splits are drawn text by text within each category, so that every
category is in all three. A text's tokens end with the end-of-text token where there is one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from moe_finetune.errors import CheckpointError, DataError
from moe_finetune.io.json_file import parse_json
from moe_finetune.io.safetensors_header import TensorInfo, read_header

if TYPE_CHECKING:
    from moe_finetune.upcycle.recipe import TextSection

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
LEAST_TEXTS = 3
TOKENS_FILE, INDEX_FILE = "tokens.safetensors", "texts.json"


@dataclass(frozen=True)
class Read:
    """A category's different texts, in their sources' order, and what was left out of them.

    ``rows`` counts the sources' rows, ``repeated`` those that repeat an earlier one.
    """

    texts: list[str]
    rows: int

    @property
    def repeated(self) -> int:
        return self.rows - len(self.texts)


def read_categories(section: TextSection) -> dict[str, Read]:
    """Texts of every category; equal texts of a category count once, and are counted.

    Raises:
        DataError: a source that cannot be read, or a category with fewer than three texts.
    """
    if section.corpus == "python":
        from moe_finetune.upcycle.corpus import read_corpus

        found = read_corpus()
    else:
        found = {name: _read(name, paths) for name, paths in (section.categories or {}).items()}
    categories = {}
    for name, texts in found.items():
        different = list(dict.fromkeys(texts))
        if len(different) < LEAST_TEXTS:
            repeated = len(texts) - len(different)
            raise DataError(
                f"texts.categories.{name}: {len(different)} different texts"
                + (f" ({repeated} of {len(texts)} rows repeat others)" if repeated else "")
                + f", wanted at least {LEAST_TEXTS} (train, validation and test); add texts or "
                "leave the category out"
            )
        kept = different[: section.limit]
        categories[name] = Read(kept, len(texts) - (len(different) - len(kept)))
    return categories


def remark_on_repetitions(found: Mapping[str, Read]) -> str | None:
    """What to say of texts that occur more than once, or None without any."""
    lines = [
        f"{name} {each.repeated} of {each.rows}" for name, each in found.items() if each.repeated
    ]
    if not lines:
        return None
    return f"rows that repeat another of their category are left out: {', '.join(lines)}"


def _read(category: str, paths: str | list[str]) -> list[str]:
    from moe_finetune.data.rows import Former
    from moe_finetune.data.sources import read_rows

    texts = []
    for source in [paths] if isinstance(paths, str) else paths:
        try:
            former = Former("text")
            texts += [former(place, row)["text"] for place, row in read_rows(source)]
        except DataError as error:
            raise DataError(f"texts.categories.{category}: {error}") from error
    return texts


def _mapped(info: TensorInfo) -> np.ndarray:
    dtype = {"I32": "<i4", "I64": "<i8"}[info.dtype]
    if not info.size:
        return np.zeros(info.shape, dtype)
    return np.memmap(info.file, dtype, "r", info.offset, info.shape)


def split_texts(texts: Sequence[str], seed: int) -> dict[Split, list[str]]:
    """Eight, one and one tenths of the texts, at least one in each, drawn with ``seed``."""
    count = len(texts)
    tenth = max(1, round(count / 10))
    order = np.random.default_rng([seed, count]).permutation(count)
    ends = {
        "test": order[:tenth],
        "validation": order[tenth : 2 * tenth],
        "train": order[2 * tenth :],
    }
    return {split: [texts[i] for i in sorted(ends[split])] for split in SPLITS}


@dataclass(frozen=True)
class Texts:
    """Tokenized texts: for each split and category a flat array of ids and the texts' lengths."""

    categories: tuple[str, ...]
    arrays: Mapping[str, np.ndarray]

    @classmethod
    def tokenize(cls, categories: Mapping[str, Sequence[str]], tokenizer: Any, seed: int) -> Texts:
        arrays: dict[str, np.ndarray] = {}
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        for number, texts in enumerate(categories.values()):
            for split, part in split_texts(texts, seed).items():
                rows = [ids + end for ids in tokenizer(part, add_special_tokens=False)["input_ids"]]
                arrays[f"{split}.{number}.ids"] = np.array([*chain.from_iterable(rows)], np.int32)
                arrays[f"{split}.{number}.lengths"] = np.array([len(r) for r in rows], np.int64)
        return cls(tuple(categories), arrays)

    def documents(self, split: Split, category: int) -> list[np.ndarray]:
        """Token ids of every text of a category's split."""
        ids = self.arrays[f"{split}.{category}.ids"]
        ends = np.cumsum(self.arrays[f"{split}.{category}.lengths"])
        return np.split(ids, ends[:-1])

    def windows(
        self, split: Split, category: int, length: int, limit: int | None = None
    ) -> list[np.ndarray]:
        """The first ``length`` tokens of each text that has two or more; evenly thinned."""
        found = [ids[:length] for ids in self.documents(split, category) if len(ids) > 1]
        if limit is not None and len(found) > limit:
            found = [found[i] for i in np.linspace(0, len(found) - 1, limit).round().astype(int)]
        return found

    def blocks(self, categories: Iterable[int], length: int, seed: int, file: Path) -> np.ndarray:
        """Training texts of some categories in a random order, laid end to end: ``(rows, length)``.

        They are written to ``file`` and mapped from there, so that a row is in memory only while it
        is read. The same arguments give the same file.

        Raises:
            DataError: together they are shorter than one row.
        """
        chosen = list(categories)
        self.check_rows(chosen, length)
        documents = [ids for category in chosen for ids in self.documents("train", category)]
        with file.open("wb") as stream:
            for place in np.random.default_rng(seed).permutation(len(documents)):
                documents[place].astype("<i4", copy=False).tofile(stream)
            rows = stream.tell() // (4 * length)
        return np.memmap(file, "<i4", "r", shape=(rows, length))

    def check_rows(self, categories: Sequence[int], length: int) -> None:
        """Raise DataError where the categories' training texts are shorter than one row."""
        tokens = sum(self.arrays[f"train.{c}.ids"].size for c in categories)
        if tokens < length:
            names = ", ".join(self.categories[c] for c in categories) or "no category"
            raise DataError(
                f"texts: {names}: {tokens} training tokens are less than one row of "
                f"texts.max_length {length}; add texts or lower it"
            )

    def counts(self, vocabulary: int) -> np.ndarray:
        """Occurrences of every token id in each category's training texts: ``(C, V)`` int64."""
        return np.stack(
            [
                np.bincount(self.arrays[f"train.{c}.ids"], minlength=vocabulary)
                for c in range(len(self.categories))
            ]
        )

    def save(self, folder: Path) -> None:
        from safetensors.numpy import save_file

        save_file(dict(self.arrays), folder / TOKENS_FILE)
        sizes = {
            name: {s: int(self.arrays[f"{s}.{i}.lengths"].size) for s in SPLITS}
            | {"train_tokens": int(self.arrays[f"train.{i}.ids"].size)}
            for i, name in enumerate(self.categories)
        }
        text = json.dumps({"categories": sizes}, indent=2, ensure_ascii=False) + "\n"
        (folder / INDEX_FILE).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Texts:
        """Read what :meth:`save` wrote; the arrays are mapped from the file, not read."""
        try:
            index = parse_json((folder / INDEX_FILE).read_bytes())
            header = read_header(folder / TOKENS_FILE, CheckpointError)
            arrays = {name: _mapped(info) for name, info in header.tensors.items()}
            return cls(tuple(index["categories"]), arrays)
        except (OSError, ValueError, KeyError, TypeError, CheckpointError) as error:
            raise CheckpointError(
                f"{folder}: the tokenized texts cannot be read ({error}); remove the folder and "
                "run the stage 'dense' again"
            ) from None
