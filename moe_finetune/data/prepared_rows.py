"""From the recipe's ``data:`` to token ids and labels, in an order that the seed fixes.

The result has ``input_ids`` and ``labels``, which TRL's ``SFTTrainer`` only packs
(``packing_strategy``) or pads. Truncated and dropped rows are counted and logged.

Rows go to disk as they are read and as they are tokenized, and the result is memory-mapped, so
memory does not grow with the data. A folder ``data/<key>`` of the cache holds ``rows/*.arrow`` and
``counts.json``; it appears whole, and its name is a hash of everything that determines its
content. The same recipe thus prepares its data once, and one of several processes, of the same or
another run, prepares it while the others wait for its lock.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_finetune.data.chat import RenderingError
from moe_finetune.data.held_out import held_out_of, warn_of_few
from moe_finetune.data.row_lengths import LengthsOfData, lengths_of_tokens
from moe_finetune.data.sources import (
    DROP_REMEDY,
    SourceReader,
    files_line,
    listed,
    rows_of,
    source_identity,
)
from moe_finetune.data.template_fields import field_reader
from moe_finetune.data.tokenize import IGNORED, Tokens, set_chat_template, tokenize_row
from moe_finetune.data.turns import TurnCounts, each_answer, until_last_answer
from moe_finetune.errors import DataError, DiskSpaceError, OutputError
from moe_finetune.io import output_folder, output_lock, sync
from moe_finetune.io.cache_folder import cache_folder
from moe_finetune.io.counted import counted, in_number
from moe_finetune.io.json_file import read_object
from moe_finetune.io.row_files import Row
from moe_finetune.models.tokenizer import Tokenizer
from moe_finetune.recipe.data import DataSection, DataSource, Paths

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)
FORMAT = 13
"""Increase this when the code gives different tokens, labels or counts for the same input."""
COLUMNS = ("input_ids", "labels")
_COUNTS = "counts.json"
_SAID = {
    "truncated": "{rows} {are} longer than data.max_length {max_length} and {were} truncated by "
    "{cut} tokens in total",
    "dropped": "{rows} {are} longer than data.max_length {max_length} and {were} dropped "
    "(data.overlong is 'drop', or no learned token would remain)",
    "unlearned": "{rows} {have} no answer to learn and {were} dropped",
    "malformed": "{rows} {are} malformed and {were} dropped; the first: {first}",
    "unanswered": "{rows} {end} with turns that no answer follows; those turns were dropped",
    "rewritten": "{rows}: the chat template renders earlier answers differently once the "
    "conversation goes on; those answers are not learned (data.turns: each makes an example of "
    "every answer)",
    "endless": "{rows}: the chat template ends an answer without a special token, so the model "
    "does not learn where to stop; data.chat_template: training adds the token where TRL has a "
    "version of the template, as for GLM-4.5; otherwise give a Jinja file",
    "unlocated": "{rows}: the chat template refuses the turns before an answer, as of one that "
    "opens the conversation; that answer is not learned",
    "thoughtless": "{rows}: an answer has no thoughts where the chat template's prompt opens a "
    "think block, so the model learns to end its thoughts at once",
    "delimited": "{rows} already {have} the special token that begins or ends a text; no second "
    "one is added",
    "straddled": "{rows}: prompt and completion meet inside one token, which is learned; end "
    "the prompt without a space to avoid it",
}
"""What can happen to a row, and what the log says about it."""
_FLAGS = {name: 1 << bit for bit, name in enumerate(_SAID)}
_OF_TOKENS = [field.name for field in dataclasses.fields(Tokens) if field.name in _SAID]


@dataclass(frozen=True)
class Examples:
    """The training and validation rows of a run, and the rows on which routing is measured.

    Attributes:
        train: shuffled by the seed.
        validation: in the files' order; None without ``data.validation``.
        sources: by path, the rows of each validation source, or of each training source if there is
            no validation data, in the source's order.
        lengths: of the rows as the stage's trainer gets them.
        known_largest: the largest token id of rows that the stage's trainer tokenizes.
    """

    train: Dataset
    validation: Dataset | None
    sources: list[tuple[str, Dataset]]
    lengths: LengthsOfData
    known_largest: int = 0

    @property
    def largest_id(self) -> int:
        """The largest token id of all rows."""
        import pyarrow.compute as pc

        largest = self.known_largest
        for rows in (self.train, self.validation):
            if rows is not None and "input_ids" in rows.column_names and len(rows):
                column = rows.data.column("input_ids")
                largest = max(largest, *(pc.max(pc.list_flatten(c)).as_py() for c in column.chunks))
        return largest


@dataclass
class Counts:
    """Counts of one dataset's rows: ``rows`` that could be used, ``tokens`` and ``learned`` of kept
    rows, ``cut`` tokens, kept rows of each source in order, rows to which something happened,
    columns that nothing reads, and sentences about ``turns``.
    """

    rows: int
    tokens: int
    learned: int
    cut: int
    sources: list[int]
    notes: dict[str, int]
    first_malformed: str = ""
    unread: list[str] = dataclasses.field(default_factory=list)
    turns: list[str] = dataclasses.field(default_factory=list)

    def lines(self, max_length: int) -> list[str]:
        """Sentences for the log: the first always, the others if something happened."""
        values = {"max_length": max_length, "cut": self.cut, "first": self.first_malformed}
        return [
            f"{counted(self.rows, 'row')}, {counted(self.tokens, 'token')}, "
            f"{self.learned:,} of them learned",
            *(said(name, self.notes[name], **values) for name in _SAID if self.notes[name]),
            *self.turns,
            *unread_lines(self.unread),
        ]  # fmt: skip


def said(what: str, count: int, **values: Any) -> str:
    """The log's sentence about what happened to ``count`` rows."""
    return in_number(_SAID[what], count).format(rows=counted(count, "row"), **values)


def unread_lines(columns: Iterable[str]) -> list[str]:
    """The log's sentence about columns that nothing reads, if there are any."""
    names = ", ".join(sorted(columns))
    return [f"not used: {names}"] if names else []


def load_examples(data: DataSection, tokenizer: Tokenizer, seed: int) -> Examples:
    """Training and validation examples with ``input_ids`` and ``labels`` (-100: no loss).

    ``data.seed``, or ``seed``, shuffles the training rows and draws those of a ``limit``;
    validation keeps the file's order, and its draw does not depend on the seed.
    """
    set_chat_template(tokenizer, data.chat_template)
    order = data.seed if data.seed is not None else seed
    rows, counts = prepare(data.train, data, tokenizer, "train", order)
    # The order takes 8 bytes per row in memory; on disk it would be one file per seed.
    train = rows.shuffle(order, keep_in_memory=True)
    validation = None
    measured = data.train
    if data.validation_sources is not None:
        drawn = order if isinstance(data.validation, float) else 0
        rows, counts = prepare(data.validation_sources, data, tokenizer, "validation", drawn)
        validation, measured = rows, data.validation_sources
        warn_of_few(data, len(train), len(validation))
    ends = list(itertools.accumulate(counts.sources))
    parts = [rows.select(range(end - n, end)) for n, end in zip(counts.sources, ends, strict=True)]
    paths = [source.path for source in listed(measured, "train")]
    sources = [(path, part) for path, part in zip(paths, parts, strict=True) if len(part)]
    lengths = LengthsOfData(
        lengths_of_tokens(train, data.max_length),
        None if validation is None else lengths_of_tokens(validation, data.max_length),
    )
    return Examples(train, validation, sources, lengths)


def prepare(
    sources: Paths, data: DataSection, tokenizer: Tokenizer, name: str, seed: int = 0
) -> tuple[Dataset, Counts]:
    """The rows of ``sources`` in order, tokenized and truncated; their counts are logged.

    Validation data may have fewer rows than ``data.limit``, whose draw the seed decides.
    """
    chosen = listed(sources, name)
    for source in chosen:
        if files := files_line(source.path, source.split or data.split):
            log.info("%s data: %s", name, files)
        # Without the limit, whose draw would read the whole source.
        reader = SourceReader(source.model_copy(update={"limit": None}), data)
        next(iter(reader), None)
        if reader.former.detected:
            log.info("%s data: %s: %s", name, source.path, reader.former.detected)
    identities = [_identity(source, data) for source in chosen]
    folder = cache_folder() / "data" / _key(chosen, identities, data, tokenizer, name, seed)
    try:
        with output_lock(folder, wait=True):
            was_prepared = (folder / _COUNTS).is_file()
            if not was_prepared:
                with output_folder(folder, 0, overwrite=True) as partial:
                    counts = _write(chosen, data, tokenizer, name, seed, partial)
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
    summary, *losses = counts.lines(data.max_length)
    log.info("%s data: %s%s", name, summary, " (prepared before)" if was_prepared else "")
    for loss in losses:
        log.warning("%s data: %s", name, loss)
    return dataset, counts


def _identity(source: DataSource, data: DataSection) -> list[Any]:
    options = source.model_dump(mode="json", exclude={"path", "split"})
    return [source_identity(source.path, source.split or data.split), options]


def _key(
    chosen: list[DataSource], identities: list[Any], data: DataSection, tokenizer: Tokenizer,
    name: str, seed: int,
) -> str:  # fmt: skip
    """Hash of all that determines the prepared rows."""
    drawn = data.limit is not None or any(source.limit is not None for source in chosen)
    split = held_out_of(data, seed)
    parts = [
        FORMAT,
        [importlib.metadata.version(package) for package in ("transformers", "tokenizers")],
        type(tokenizer).__name__,
        tokenizer.backend_tokenizer.to_str(),
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
    chosen: list[DataSource],
    data: DataSection,
    tokenizer: Tokenizer,
    name: str,
    seed: int,
    folder: Path,
) -> Counts:
    """Read the sources, tokenize their rows into the dataset ``folder / "rows"``, count them."""
    from datasets import Dataset, Features, Value
    from datasets.arrow_writer import ArrowWriter

    def open_readers() -> list[SourceReader]:
        return [SourceReader(source, data, seed + n) for n, source in enumerate(chosen)]

    readers, formed_rows = rows_of(open_readers, data, name, seed)
    unanswered, turns = 0, TurnCounts()
    read = Features({"place": Value("string"), "source": Value("int32"), "row": Value("string")})
    with ArrowWriter(path=str(folder / "read.arrow"), features=read) as writer:
        for source, location, row in formed_rows:
            _check_form(chosen[source].path, readers[source].former.form, data)
            used = row
            if "messages" in row:
                turns.add(row)
            if "messages" in row and data.completion_only_loss is not False:
                used = until_last_answer(row)
                unanswered += used is not row
            answers = each_answer(used) if data.turns == "each" and "messages" in row else []
            for example in answers or [used]:
                writer.write({"place": location, "source": source, "row": _json(location, example)})
        writer.finalize()
    numbers = ("source", "flags", "tokens", "learned", "cut")
    (folder / "rows").mkdir()
    tokenized = Dataset.from_file(str(folder / "read.arrow")).map(
        _tokenize,
        fn_kwargs={"tokenizer": tokenizer, "data": data},
        with_indices=True,
        num_proc=data.num_proc,
        remove_columns=["place", "row"],
        features=Features(
            {name: [Value("int32")] for name in COLUMNS}
            | {name: Value("int32") for name in numbers}
            | {"problem": Value("string")}
        ),
        cache_file_name=str(folder / "rows" / "tokens.arrow"),
        new_fingerprint="tokens",  # hashing the tokenizer takes longer than tokenizing small data
        load_from_cache_file=False,
        desc=f"Tokenizing {name}",
    )
    (folder / "read.arrow").unlink()
    columns = tokenized.select_columns(list(numbers)).with_format("numpy")[:]
    problems = tokenized["problem"][:]  # as text: NumPy gives every row the longest one's width
    notes = {note: int((columns["flags"] & flag > 0).sum()) for note, flag in _FLAGS.items()}
    usable = len(problems) - notes["malformed"]
    first = next(filter(None, problems), "")
    usable_rows = columns["tokens"] > 0
    if not usable:
        raise DataError(
            f"data.{name}: every row is malformed ({len(problems):,}); the first: {first}"
        )
    if notes["unlearned"] == usable:
        raise DataError(
            f"data.{name}: of {counted(usable, 'row')}, none has an answer to learn; check the "
            "turns' roles and their train fields"
        )
    if not usable_rows.any():
        raise DataError(
            f"data.{name}: of {counted(usable, 'row')}, none has a learned token within "
            f"data.max_length {data.max_length}; raise it"
        )
    notes["unanswered"] = unanswered
    notes["malformed"] += sum(reader.malformed for reader in readers)
    return Counts(
        rows=usable,
        tokens=int(columns["tokens"].sum()),
        learned=int(columns["learned"].sum()),
        cut=int(columns["cut"].sum()),
        sources=np.bincount(columns["source"][usable_rows], minlength=len(chosen)).tolist(),
        notes=notes,
        first_malformed=next((r.first_malformed for r in readers if r.malformed), first),
        unread=sorted(set[str]().union(*(reader.unread for reader in readers))),
        turns=turns.lines(field_reader(tokenizer)),
    )


def _rows(folder: Path) -> Dataset:
    """The rows of a folder of the cache that are used: those that have tokens."""
    from datasets import Dataset, concatenate_datasets

    files = sorted((folder / "rows").glob("tokens*.arrow"))  # one of each process
    rows = concatenate_datasets([Dataset.from_file(str(file)) for file in files])
    used_N = rows.select_columns("tokens").with_format("numpy")[:]["tokens"] > 0
    rows = rows.select_columns(list(COLUMNS))
    return rows if used_N.all() else rows.select(used_N.nonzero()[0])


def _check_form(source: str, form: str, data: DataSection) -> None:
    if form == "text" and data.completion_only_loss:
        raise DataError(
            f"{source} contains plain texts, which have no completion to mask for; remove "
            "data.completion_only_loss=true"
        )
    if form != "text" and data.packing and data.packing_strategy != "bfd":
        raise DataError(
            f"{source} contains {form}, and data.packing_strategy '{data.packing_strategy}' "
            "splits examples; set it to 'bfd'"
        )


def _json(location: str, row: Row) -> str:
    """A row as JSON: a table gives all objects one's fields, and its own JSON no larger numbers."""
    try:
        return json.dumps(row, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(f"{location}: a value is neither text nor a number: {error}") from error


def _tokenize(example: Row, index: int, tokenizer: Tokenizer, data: DataSection) -> Row:
    """Ids and labels of a row within ``max_length``, and what happened to it."""
    location, row = example["place"], json.loads(example["row"])
    try:
        return _within(tokenize_row(row, tokenizer, data.completion_only_loss is not False),
                       location, data)  # fmt: skip
    except DataError as error:
        refused = isinstance(error, RenderingError)
        if refused and row.get("opening"):
            return _within(Tokens([], [], unlocated=True), location, data)
        message = str(error) if str(error).startswith(location) else f"{location}: {error}"
        if not refused or data.malformed != "drop":
            raise DataError(message + (DROP_REMEDY if refused and index else "")) from error
        nothing = _within(Tokens([], []), location, data)
        return nothing | {"flags": _FLAGS["malformed"], "problem": message}


def _within(tokens: Tokens, location: str, data: DataSection) -> Row:
    splits = data.packing and data.packing_strategy != "bfd"
    cut = 0 if splits else max(0, len(tokens.input_ids) - data.max_length)
    if cut and data.overlong == "error":
        raise DataError(
            f"{location}: {len(tokens.input_ids)} tokens, longer than data.max_length "
            f"{data.max_length}; raise it, or set data.overlong to truncate or drop"
        )
    end = len(tokens.input_ids) - cut
    learned = sum(label != IGNORED for label in tokens.labels[:end])
    unlearned = all(label == IGNORED for label in tokens.labels)
    dropped = not unlearned and (not learned or bool(cut and data.overlong == "drop"))
    if dropped or unlearned:
        end = learned = cut = 0
    notes = {"truncated": cut > 0, "dropped": dropped, "unlearned": unlearned}
    notes |= {name: getattr(tokens, name) for name in _OF_TOKENS}
    return {
        "input_ids": tokens.input_ids[:end],
        "labels": tokens.labels[:end],
        "tokens": end,
        "learned": learned,
        "cut": cut,
        "flags": sum(_FLAGS[name] for name, holds in notes.items() if holds),
        "problem": "",
    }
