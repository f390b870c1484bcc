"""The recipe's ``data:`` -> token ids and labels, in an order that the seed fixes.

The result has ``input_ids`` and ``labels``, which TRL's ``SFTTrainer`` takes as they are: it only
packs them (``packing_strategy``) or pads them. Whatever is cut or left out is counted and logged.

Rows go to disk as they are read and as they are tokenized, and the result is memory-mapped from the
cache folder, so memory does not grow with the data. A prepared dataset's folder is named after all
that decides its content (see :mod:`moe_finetune.data.prepared`): the same recipe prepares
nothing a second time, and of several processes one prepares while the others wait.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_finetune.data.prepared import data_key, prepared_once
from moe_finetune.data.readers import SourceReader, draw
from moe_finetune.data.rows import Form
from moe_finetune.data.sources import source_identity
from moe_finetune.data.tokenize import IGNORED, set_chat_template, tokenize_row
from moe_finetune.errors import DataError
from moe_finetune.io.rows import Placed, Row
from moe_finetune.recipe.sections import DataSection, DataSource, Paths

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)
COLUMNS = ("input_ids", "labels")


@dataclass
class Counts:
    """What became of the rows of one dataset; ``tokens`` and ``learned`` are of the rows kept, and
    ``sources`` says how many those are of each source; they lie in the sources' order.
    """

    rows: int
    tokens: int
    learned: int
    dropped: int
    truncated: int
    cut: int
    rewritten: int
    straddled: int
    sources: list[int]

    def lines(self, max_length: int) -> list[str]:
        """Sentences for the log; the first always, the others where something was lost."""
        said = [f"{self.rows} rows, {self.tokens} tokens, {self.learned} of them learned"]
        if self.truncated:
            said.append(
                f"{self.truncated} rows are longer than data.max_length {max_length} and were cut, "
                f"{self.cut} tokens in all"
            )
        if self.dropped:
            said.append(
                f"{self.dropped} rows are longer than data.max_length {max_length} and were left "
                "out (data.overlong 'drop', or the cut left nothing to learn)"
            )
        if self.rewritten:
            said.append(
                f"{self.rewritten} rows: the chat template renders earlier answers differently "
                "once the conversation goes on; those answers are not learned"
            )
        if self.straddled:
            said.append(
                f"{self.straddled} rows: prompt and completion meet inside one token, which is "
                "learned; end the prompt without a space to avoid it"
            )
        return said


@dataclass(frozen=True)
class Examples:
    """What a run learns from and is measured on.

    Attributes:
        train: shuffled by the seed.
        validation: in the files' order; None without ``data.validation``.
        sources: the rows of each source that is measured, validation or else training, in its
            order, by the source's path.
    """

    train: Dataset
    validation: Dataset | None
    sources: list[tuple[str, Dataset]]


def load_dataset_for(
    data: DataSection, tokenizer: Any, seed: int
) -> tuple[Dataset, Dataset | None]:
    """Training and validation examples of :func:`load_examples`."""
    found = load_examples(data, tokenizer, seed)
    return found.train, found.validation


def load_examples(data: DataSection, tokenizer: Any, seed: int) -> Examples:
    """Training and validation examples with ``input_ids`` and ``labels`` (-100: not learned).

    Sets the tokenizer's chat template when ``data.chat_template`` names one. ``data.seed``, or
    ``seed`` when that is unset, shuffles the training rows and draws those that a ``limit`` keeps.
    Validation keeps the file's order, and its draw is the same for all seeds.

    Raises:
        DataError: a file, line or row that cannot be used, fewer rows than a ``limit`` asks for,
            or nothing left to train on.
    """
    set_chat_template(tokenizer, data.chat_template)
    order = data.seed if data.seed is not None else seed
    rows, counts = _prepare(data.train, data, tokenizer, "train", order)
    # An order of the rows in memory is 8 bytes a row; on disk it would be a file a seed.
    train, validation, measured = rows.shuffle(order, keep_in_memory=True), None, data.train
    if data.validation is not None:
        rows, counts = _prepare(data.validation, data, tokenizer, "validation", 0)
        validation, measured = rows, data.validation
    ends = list(itertools.accumulate(counts.sources))
    parts = [rows.select(range(end - n, end)) for n, end in zip(counts.sources, ends, strict=True)]
    paths = [each if isinstance(each, str) else each.path for each in _listed(measured)]
    return Examples(train, validation, list(zip(paths, parts, strict=True)))


def prepare(sources: Paths, data: DataSection, tokenizer: Any, name: str, seed: int = 0) -> Dataset:
    """Rows of ``sources`` in their order, tokenized and cut; logs what became of them.

    Args:
        sources: what to read: ``data.train`` or ``data.validation``.
        data: how to read it.
        tokenizer: a fast tokenizer; its content is part of what the result is known by.
        name: "train" or "validation", for messages. Validation data may have fewer rows than
            ``data.limit``.
        seed: decides which rows a ``limit`` keeps.
    """
    return _prepare(sources, data, tokenizer, name, seed)[0]


def _listed(sources: Paths) -> list[str | DataSource]:
    return [sources] if isinstance(sources, str) else [*sources]


def _prepare(
    sources: Paths, data: DataSection, tokenizer: Any, name: str, seed: int
) -> tuple[Dataset, Counts]:
    listed = _listed(sources)
    if not listed:
        raise DataError(f"data.{name} is an empty list; name a file, folder or hub dataset")
    drawn = data.limit is not None or any(
        isinstance(source, DataSource) and source.limit is not None for source in listed
    )
    identities = [_identity(source, data) for source in listed]
    key = data_key(
        tokenizer,
        data.model_dump(mode="json", exclude={"train", "validation", "seed", "num_proc", "split"}),
        identities,
        [name, seed] if drawn else [],
    )

    def make(folder: Path) -> dict[str, Any]:
        rows = _rows(listed, data, name, seed)
        counts = dataclasses.asdict(_write(rows, len(listed), data, tokenizer, name, folder))
        for source, identity in zip(listed, identities, strict=True):
            if _identity(source, data) != identity:
                path = source if isinstance(source, str) else source.path
                raise DataError(
                    f"data.{name}: {path} changed while it was being prepared; start again when "
                    "nothing writes to it"
                )
        return counts

    for line in detected(listed, data):
        log.info("%s data: %s", name, line)
    dataset, counted, found = prepared_once(key, make)
    counts = Counts(**counted)
    summary, *losses = counts.lines(data.max_length)
    log.info("%s data: %s%s", name, summary, " (prepared before)" if found else "")
    for loss in losses:
        log.warning("%s data: %s", name, loss)
    return dataset, counts


def detected(sources: list[str | DataSource], data: DataSection) -> Iterator[str]:
    """Yield for each source the layout that its first row was found to have."""
    for source in sources:
        reader = SourceReader.of(source, data)
        # Without its limit: a draw would read the whole source.
        reader = dataclasses.replace(
            reader, source=reader.source.model_copy(update={"limit": None})
        )
        next(iter(reader), None)
        if reader.former.detected:
            yield f"{reader.source.path}: {reader.former.detected}"


def _identity(source: str | DataSource, data: DataSection) -> list[Any]:
    reader = SourceReader.of(source, data)
    options = reader.source.model_dump(mode="json", exclude={"path", "split"})
    return [source_identity(reader.source.path, reader.split), options]


def _rows(
    sources: list[str | DataSource], data: DataSection, name: str, seed: int
) -> Iterator[Placed]:
    rows = itertools.chain.from_iterable(
        _source_rows(source, data, seed, number) for number, source in enumerate(sources)
    )
    if data.limit is None:
        return rows
    if name == "validation":
        return _at_most(rows, data.limit, seed)
    return draw(rows, data.limit, seed, f"data.limit of data.{name}")


def _at_most(rows: Iterator[Placed], limit: int, seed: int) -> Iterator[Placed]:
    first = list(itertools.islice(rows, limit))
    if len(first) < limit:
        return iter(first)
    return draw(itertools.chain(first, rows), limit, seed, "data.limit of data.validation")


def _source_rows(
    source: str | DataSource, data: DataSection, seed: int, number: int
) -> Iterator[Placed]:
    """Rows of the source, each with its ``number`` in the field ``source``."""
    reader = SourceReader.of(source, data, seed + number)
    empty = True
    for place, row in reader:
        empty = False
        yield place, {**row, "source": number}
    if empty:
        raise DataError(f"{reader.source.path} is empty; wanted at least one row")
    _check_form(reader.source.path, reader.former.form, data)


def _check_form(source: str, form: Form | str, data: DataSection) -> None:
    if form == "text" and data.completion_only_loss:
        raise DataError(f"{source} holds texts, which data.completion_only_loss=true cannot mask")
    if form != "text" and data.packing and data.packing_strategy != "bfd":
        raise DataError(
            f"{source} holds {form}, and data.packing_strategy '{data.packing_strategy}' cuts "
            "examples apart; use 'bfd'"
        )


def _write(
    rows: Iterator[Placed],
    num_sources: int,
    data: DataSection,
    tokenizer: Any,
    name: str,
    folder: Path,
) -> Counts:
    """Tokenize ``rows`` into the dataset ``folder / "rows"``, through files beside it."""
    from datasets import Dataset, Features, Value
    from datasets.arrow_writer import ArrowWriter

    text, number, flag = Value("string"), Value("int32"), Value("bool")
    read = {"place": text, "source": number, "prompt": text, "completion": text, "text": text}
    turns = {"messages": [{"role": text, "content": text}]}
    with ArrowWriter(path=str(folder / "read.arrow"), features=Features(read | turns)) as writer:
        for place, row in rows:
            writer.write({"place": place, **{field: row.get(field) for field in _READ}})
        writer.finalize()
    tokenized = Dataset.from_file(str(folder / "read.arrow")).map(
        _tokenize,
        fn_kwargs={"tokenizer": tokenizer, "data": data},
        num_proc=data.num_proc,
        remove_columns=["place", *_READ],
        features=Features(
            {"input_ids": [number], "labels": [number], "source": number}
            | dict.fromkeys(("tokens", "learned", "cut"), Value("int64"))
            | dict.fromkeys(("dropped", "rewritten", "straddled"), flag)
        ),
        cache_file_name=str(folder / "tokens.arrow"),
        new_fingerprint="tokens",  # hashing the tokenizer for one would take longer than small data
        load_from_cache_file=False,
        desc=f"Tokenizing {name}",
    )
    columns = tokenized.remove_columns(list(COLUMNS)).with_format("numpy")[:]
    kept = ~columns["dropped"]
    if not kept.any():
        raise DataError(
            f"data.{name}: none of the {len(kept)} rows has anything to learn within "
            f"data.max_length {data.max_length}; raise it"
        )
    chosen = tokenized if kept.all() else tokenized.select(kept.nonzero()[0])
    chosen.select_columns(list(COLUMNS)).save_to_disk(str(folder / "rows"))
    for left in folder.glob("*.arrow"):
        left.unlink()
    return Counts(
        rows=len(kept),
        tokens=int(columns["tokens"][kept].sum()),
        learned=int(columns["learned"][kept].sum()),
        dropped=int(columns["dropped"].sum()),
        truncated=int((columns["cut"] > 0).sum()),
        cut=int(columns["cut"].sum()),
        rewritten=int(columns["rewritten"].sum()),
        straddled=int(columns["straddled"].sum()),
        sources=np.bincount(columns["source"][kept], minlength=num_sources).tolist(),
    )


_READ = ("source", "messages", "prompt", "completion", "text")


def _tokenize(row: Row, tokenizer: Any, data: DataSection) -> dict[str, Any]:
    """One row's ids and labels within ``max_length``, and what was lost."""
    try:
        tokens = tokenize_row(row, tokenizer, data.completion_only_loss is not False)
    except DataError as error:
        raise DataError(f"{row['place']}: {error}") from error
    splits = data.packing and data.packing_strategy != "bfd"
    cut = 0 if splits else max(0, len(tokens.input_ids) - data.max_length)
    if cut and data.overlong == "error":
        raise DataError(
            f"{row['place']}: {len(tokens.input_ids)} tokens, longer than data.max_length "
            f"{data.max_length}; raise it, or set data.overlong to truncate or drop"
        )
    end = len(tokens.input_ids) - cut
    labels = tokens.labels[:end]
    learned = sum(label != IGNORED for label in labels)
    dropped = not learned or bool(cut and data.overlong == "drop")
    return {
        "input_ids": tokens.input_ids[:end],
        "labels": labels,
        "tokens": end,
        "learned": learned,
        "dropped": dropped,
        "cut": 0 if dropped else cut,
        "rewritten": tokens.rewritten,
        "straddled": tokens.straddled,
        "source": row["source"],
    }
