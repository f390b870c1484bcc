"""From the recipe's ``data:`` to token ids and labels, in an order that the seed fixes.

The result has ``input_ids`` and ``labels``, which TRL's ``SFTTrainer`` only packs
(``packing_strategy``) or pads. Truncated and dropped rows are counted and logged.

Rows go to disk as they are read and as they are tokenized, and the result is memory-mapped from the
cache folder, so memory does not grow with the data. A prepared dataset's folder is named by a hash
of everything that determines its content (see :mod:`moe_finetune.data.prepared`). The same recipe
thus prepares its data once, and one of several processes prepares it while the others wait.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.data.prepared import data_key, prepared_once
from moe_finetune.data.readers import Rows, SourceReader, listed, rows_of
from moe_finetune.data.rows import Form
from moe_finetune.data.sources import files_line, source_identity
from moe_finetune.data.tokenize import set_chat_template
from moe_finetune.data.tokenized import Counts, write_tokenized
from moe_finetune.errors import DataError
from moe_finetune.recipe.data import DataSection, DataSource, Paths

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Examples:
    """The training and validation rows of a run, and the rows on which routing is measured.

    Attributes:
        train: shuffled by the seed.
        validation: in the files' order; None without ``data.validation``.
        sources: by path, the rows of each validation source, or of each training source if there is
            no validation data, in the source's order.
        tokenizer: for a trainer that renders turns itself; its chat template reads the tools and
            variables in the rows' turns.
    """

    train: Dataset
    validation: Dataset | None
    sources: list[tuple[str, Dataset]]
    tokenizer: Any = None


def load_examples(data: DataSection, tokenizer: Any, seed: int) -> Examples:
    """Return training and validation examples with ``input_ids`` and ``labels`` (-100: no loss).

    Sets the tokenizer's chat template when ``data.chat_template`` names one. ``data.seed``, or
    ``seed`` when that is unset, shuffles the training rows and draws the rows for a ``limit``.
    Validation keeps the file's order, and its draw does not depend on the seed.

    Raises:
        DataError: a file, line or row cannot be used, there are fewer rows than a ``limit``, or no
            training rows remain.
    """
    set_chat_template(tokenizer, data.chat_template)
    order = data.seed if data.seed is not None else seed
    rows, counts = prepare(data.train, data, tokenizer, "train", order)
    # The order takes 8 bytes per row in memory; on disk it would be one file per seed.
    train, validation, measured = rows.shuffle(order, keep_in_memory=True), None, data.train
    if data.validation is not None:
        rows, counts = prepare(data.validation, data, tokenizer, "validation", 0)
        validation, measured = rows, data.validation
    ends = list(itertools.accumulate(counts.sources))
    parts = [rows.select(range(end - n, end)) for n, end in zip(counts.sources, ends, strict=True)]
    paths = [source.path for source in listed(measured, "train")]
    return Examples(train, validation, list(zip(paths, parts, strict=True)))


def prepare(
    sources: Paths, data: DataSection, tokenizer: Any, name: str, seed: int = 0
) -> tuple[Dataset, Counts]:
    """Return the rows of ``sources`` in order, tokenized and truncated, and log their counts.

    Args:
        sources: ``data.train`` or ``data.validation``.
        tokenizer: a fast tokenizer; its content is part of the cache key.
        name: "train" or "validation", for messages. Validation data may have fewer rows than
            ``data.limit``.
        seed: decides which rows a ``limit`` keeps.
    """
    chosen = listed(sources, name)
    drawn = data.limit is not None or any(source.limit is not None for source in chosen)
    identities = [_identity(source, data) for source in chosen]
    excluded = {"train", "validation", "seed", "num_proc", "split"}
    decides = [
        data.model_dump(mode="json", exclude=excluded),
        identities,
        [name, seed] if drawn else [],
    ]

    def make(folder: Path) -> dict[str, Any]:
        readers = [SourceReader.of(source, data, seed + n) for n, source in enumerate(chosen)]
        rows = _checked(rows_of(readers, data, name, seed), readers, data)
        written = write_tokenized(rows, len(chosen), data, tokenizer, name, folder)
        fields = set(written.unread).union(*(reader.unread for reader in readers))
        malformed = [(reader.malformed, reader.first_malformed) for reader in readers]
        malformed.append((written.malformed, written.first_malformed))
        counts = {
            **dataclasses.asdict(written),
            "unread": sorted(fields),
            "malformed": sum(count for count, _ in malformed),
            "first_malformed": next((first for _, first in malformed if first), ""),
        }
        for source, identity in zip(chosen, identities, strict=True):
            if _identity(source, data) != identity:
                raise DataError(
                    f"data.{name}: {source.path} changed during preparation; start again when no "
                    "program writes to it"
                )
        return counts

    for source in chosen:
        if files := files_line(source.path, source.split or data.split):
            log.info("%s data: %s", name, files)
    for line in detected(chosen, data):
        log.info("%s data: %s", name, line)
    dataset, counted, was_prepared = prepared_once(data_key(tokenizer, *decides), make)
    counts = Counts(**counted)
    summary, *losses = counts.lines(data.max_length)
    log.info("%s data: %s%s", name, summary, " (prepared before)" if was_prepared else "")
    for loss in losses:
        log.warning("%s data: %s", name, loss)
    return dataset, counts


def detected(sources: list[DataSource], data: DataSection) -> Iterator[str]:
    """Yield the detected layout of each source's first row."""
    for source in sources:
        reader = SourceReader.of(source, data)
        # Without the limit, whose draw would read the whole source.
        reader = dataclasses.replace(
            reader, source=reader.source.model_copy(update={"limit": None})
        )
        next(iter(reader), None)
        if reader.former.detected:
            yield f"{reader.source.path}: {reader.former.detected}"


def _identity(source: DataSource, data: DataSection) -> list[Any]:
    reader = SourceReader.of(source, data)
    options = reader.source.model_dump(mode="json", exclude={"path", "split"})
    return [source_identity(reader.source.path, reader.split), options]


def _checked(rows: Rows, readers: list[SourceReader], data: DataSection) -> Rows:
    for index, location, row in rows:
        _check_form(readers[index].source.path, readers[index].former.form, data)
        yield index, location, row


def _check_form(source: str, form: Form | str, data: DataSection) -> None:
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
