"""The rows of a stage, read, formed and prepared once, and kept in the cache on disk.

Rows go to disk as they are formed and as they are prepared, by several processes, and the result is
memory-mapped, so memory does not grow with the data. A folder ``data/<key>`` of the cache holds
``rows/*.arrow`` and ``counts.json``; it appears whole, and its name is a hash of everything that
determines its content. The same recipe thus prepares its data once, and one of several processes,
of the same or another run, prepares it while the others wait for its lock.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import logging
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from moe_finetune.data.chat import RenderingError
from moe_finetune.data.exact_rows import row_of_text, row_text
from moe_finetune.data.held_out import held_out_of
from moe_finetune.data.row_counts import (
    CUT,
    DROPPED,
    FLAG,
    FLAGS,
    LARGEST,
    LEARNED,
    NUMBERS,
    PROBLEM,
    TOKENS,
    Counts,
    described,
)
from moe_finetune.data.sources import (
    DROP_REMEDY,
    SourceReader,
    files_line,
    listed,
    rows_of,
    source_identity,
)
from moe_finetune.errors import DataError, DiskSpaceError, OutputError
from moe_finetune.io import output_folder, output_lock, sync
from moe_finetune.io.cache_folder import cache_folder
from moe_finetune.io.counted import counted
from moe_finetune.io.json_file import read_object
from moe_finetune.io.row_files import Row
from moe_finetune.models.tokenizer import Tokenizer
from moe_finetune.recipe.data import DataSection, DataSource, Paths

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)
FORMAT = 15
"""Increase this when the code gives different rows or counts for the same input."""
_COUNTS = "counts.json"
_DECIDING = ("transformers", "tokenizers", "trl")
"""Packages whose code decides the tokens of a row."""
_BATCH = 1000
"""Rows that are converted at once: calls of the table for each take a sixth of short rows' time."""
_PLACE, _SOURCE, _ROW = "moe_finetune.place", "moe_finetune.source", "moe_finetune.row"


class Preparation(Protocol):
    """What a stage makes of one dataset's rows; used once, and copied to several processes."""

    data: DataSection
    tokenizer: Tokenizer

    @property
    def fields(self) -> Collection[str] | None:
        """The fields of a formed row that decide whether it is held out; None for all."""

    @property
    def plain(self) -> bool:
        """Whether an example has only values that a chat template can write as JSON."""

    def identity(self) -> list[Any]:
        """Plain values that decide the prepared rows, other than ``data`` and the tokenizer."""

    def layout(self, source: DataSource) -> str:
        """The layout that was detected in the source's first row; empty where nothing is."""

    def reader(self, source: DataSource, seed: int) -> SourceReader:
        """A reader that forms the rows of ``source``."""

    def examples(self, reader: SourceReader, location: str, row: Row) -> Iterable[Row]:
        """What to prepare of a formed row."""

    def features(self) -> dict[str, Any]:
        """The columns of prepared rows, when all examples are read."""

    def prepare(self, location: str, row: Row) -> Row:
        """The columns of an example, and those of :func:`~.row_counts.described`."""

    def add_notes(self, counts: Counts, readers: Sequence[SourceReader]) -> None:
        """Add what was counted while rows were read."""

    def none_fits(self, rows: int) -> str:
        """Why none of ``rows`` is used, for an error."""

    def summary(self, counts: Counts) -> str:
        """The log's sentence about the rows."""

    def measured(self, rows: Dataset) -> Dataset:
        """Ids and labels of one source's prepared rows, on which routing is measured."""


def prepare(
    sources: Paths, preparation: Preparation, name: str, seed: int = 0
) -> tuple[Dataset, Counts]:
    """The prepared rows of ``sources`` in order; their counts are logged.

    Validation data may have fewer rows than ``data.limit``, whose draw the seed decides.
    """
    data, chosen = preparation.data, listed(sources, name)
    for source in chosen:
        if files := files_line(source.path, source.split or data.split):
            log.info("%s data: %s", name, files)
        if layout := preparation.layout(source):
            log.info("%s data: %s: %s", name, source.path, layout)
    identities = [_identity(source, data) for source in chosen]
    folder = cache_folder() / "data" / _key(chosen, identities, preparation, name, seed)
    try:
        with output_lock(folder, wait=True):
            was_prepared = (folder / _COUNTS).is_file()
            if not was_prepared:
                with output_folder(folder, 0, overwrite=True) as partial:
                    counts = _write(chosen, preparation, name, seed, partial)
                    for source, identity in zip(chosen, identities, strict=True):
                        if _identity(source, data) != identity:
                            raise DataError(
                                f"data.{name}: {source.path} changed during preparation; start "
                                "again when no program writes to it"
                            )
                    text = json.dumps(dataclasses.asdict(counts)) + "\n"
                    (partial / _COUNTS).write_text(text, encoding="utf-8")
                    for path in partial.rglob("*"):
                        sync(path)
    except OSError as error:
        problem = "no space left" if isinstance(error, DiskSpaceError) else "it cannot be created"
        reason = problem if isinstance(error, OutputError) else error.strerror or error
        raise DataError(
            f"data: the prepared data cannot be stored in {folder.parent} ({reason}); free some "
            "space, or set MOE_FINETUNE_CACHE to another folder"
        ) from error
    counts = Counts(**read_object(folder / _COUNTS, DataError, "remove the folder"))
    dataset = _rows(folder)
    cached = " (prepared before)" if was_prepared else ""
    log.info("%s data: %s%s", name, preparation.summary(counts), cached)
    for loss in counts.losses(data.max_length):
        log.warning("%s data: %s", name, loss)
    return dataset, counts


def _identity(source: DataSource, data: DataSection) -> list[Any]:
    options = source.model_dump(mode="json", exclude={"path", "split"})
    return [source_identity(source.path, source.split or data.split), options]


def _key(
    chosen: list[DataSource],
    identities: list[Any],
    preparation: Preparation,
    name: str,
    seed: int,
) -> str:
    """Hash of all that determines the prepared rows."""
    data, tokenizer = preparation.data, preparation.tokenizer
    drawn = data.limit is not None or any(source.limit is not None for source in chosen)
    split = held_out_of(data, seed)
    parts = [
        FORMAT,
        [importlib.metadata.version(package) for package in _DECIDING],
        preparation.identity(),
        type(tokenizer).__name__,
        tokenizer.backend_tokenizer.to_str(),
        # Not in the text above: whether "<s>" in a text is the special token or three characters.
        tokenizer.split_special_tokens,
        tokenizer.special_tokens_map,
        tokenizer.chat_template,
        data.model_dump(mode="json", exclude={"train", "validation", "seed", "num_proc", "split"}),
        identities,
        [name, seed] if drawn or split else [],
        split and split.share,
    ]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _write(
    chosen: list[DataSource], preparation: Preparation, name: str, seed: int, folder: Path
) -> Counts:
    """Read the sources, prepare their rows into the dataset ``folder / "rows"``, count them."""
    from datasets import Dataset, Features, Value
    from datasets.arrow_writer import ArrowWriter
    from pyarrow import ArrowException

    def open_readers() -> list[SourceReader]:
        return [preparation.reader(source, seed + n) for n, source in enumerate(chosen)]

    data = preparation.data
    readers, formed_rows = rows_of(open_readers, data, name, seed, preparation.fields)
    read = Features({_PLACE: Value("string"), _SOURCE: Value("int32"), _ROW: Value("string")})
    examples = (
        (location, source, row_text(location, example, preparation.plain))
        for source, location, row in formed_rows
        for example in preparation.examples(readers[source], location, row)
    )
    with ArrowWriter(path=str(folder / "read.arrow"), features=read) as writer:
        while batch := list(itertools.islice(examples, _BATCH)):
            locations, numbers, texts = map(list, zip(*batch, strict=True))
            writer.write_batch({_PLACE: locations, _SOURCE: numbers, _ROW: texts})
        writer.finalize()
    (folder / "rows").mkdir()
    columns = preparation.features() | {_SOURCE: Value("int32"), PROBLEM: Value("string")}
    columns |= {column: Value("int32") for column in NUMBERS}
    try:
        prepared = Dataset.from_file(str(folder / "read.arrow")).map(
            _prepared,
            fn_kwargs={"preparation": preparation},
            with_indices=True,
            batched=True,
            batch_size=_BATCH,
            num_proc=data.num_proc,
            remove_columns=[_PLACE, _ROW],
            features=Features(columns),
            cache_file_name=str(folder / "rows" / "prepared.arrow"),
            new_fingerprint="prepared",  # hashing a tokenizer takes longer than small data
            load_from_cache_file=False,
            desc=f"Tokenizing {name}",
        )
    except (ArrowException, UnicodeEncodeError) as error:
        raise DataError(f"data.{name}: a field cannot be stored: {error}") from error
    (folder / "read.arrow").unlink()
    counts = _counted(prepared, len(chosen), preparation, name)
    malformed = [reader for reader in readers if reader.malformed]
    counts.notes["malformed"] += sum(reader.malformed for reader in malformed)
    if malformed:
        counts.first_malformed = malformed[0].first_malformed
    counts.unread = sorted(set[str]().union(*(reader.unread for reader in readers)))
    preparation.add_notes(counts, readers)
    return counts


def _counted(prepared: Dataset, sources: int, preparation: Preparation, name: str) -> Counts:
    """Counts of the prepared rows; raise DataError if none is used."""
    columns = prepared.select_columns([*NUMBERS, _SOURCE]).with_format("numpy")[:]
    problems = prepared[PROBLEM][:]  # as text: NumPy gives every row the longest one's width
    notes = {note: int((columns[FLAG] & flag > 0).sum()) for note, flag in FLAGS.items()}
    usable = len(problems) - notes["malformed"]
    first = next(filter(None, problems), "")
    if not usable:
        raise DataError(
            f"data.{name}: every row is malformed ({len(problems):,}); the first: {first}"
        )
    if notes["unlearned"] == usable:
        raise DataError(
            f"data.{name}: of {counted(usable, 'row')}, none has an answer to learn; check the "
            "turns' roles and their train fields"
        )
    used_N = _used(columns[FLAG])
    if not used_N.any():
        raise DataError(f"data.{name}: {preparation.none_fits(usable)}")
    return Counts(
        rows=usable,
        tokens=int(columns[TOKENS].sum()),
        learned=int(columns[LEARNED].sum()),
        longest=int(columns[TOKENS].max()),
        cut=int(columns[CUT].sum()),
        largest=int(columns[LARGEST].max()),
        sources=np.bincount(columns[_SOURCE][used_N], minlength=sources).tolist(),
        notes=notes,
        first_malformed=first,
    )


def _used(flags_N: Any) -> Any:
    """Which rows are used, by their flags."""
    return flags_N & sum(FLAGS[name] for name in DROPPED) == 0


def _rows(folder: Path) -> Dataset:
    """The rows of a folder of the cache that are used."""
    from datasets import Dataset, concatenate_datasets

    files = sorted((folder / "rows").glob("prepared*.arrow"))  # one of each process
    rows = concatenate_datasets([Dataset.from_file(str(file)) for file in files])
    used_N = _used(rows.select_columns(FLAG).with_format("numpy")[:][FLAG])
    rows = rows.remove_columns([*NUMBERS, PROBLEM, _SOURCE])
    return rows if used_N.all() else rows.select(used_N.nonzero()[0])


def _prepared(batch: dict[str, list[Any]], indices: list[int], preparation: Preparation) -> Any:
    """The columns of some rows."""
    rows = [
        _prepared_row(preparation, location, text, index)
        for location, text, index in zip(batch[_PLACE], batch[_ROW], indices, strict=True)
    ]
    return {name: [row[name] for row in rows] for name in rows[0]}


def _prepared_row(preparation: Preparation, location: str, text: str, index: int) -> Row:
    """A row's columns; those of a malformed one are empty if such rows are dropped."""
    try:
        return preparation.prepare(location, row_of_text(text))
    except DataError as error:
        refused = isinstance(error, RenderingError)
        message = str(error) if str(error).startswith(location) else f"{location}: {error}"
        if not refused or preparation.data.malformed != "drop":
            raise DataError(message + (DROP_REMEDY if refused and index else "")) from error
        columns = dict.fromkeys(preparation.features())
        return columns | described(happened=["malformed"], problem=message)
