"""The recipe's ``data:`` -> token ids and labels, in an order that the seed fixes.

The result has ``input_ids`` and ``labels``, which TRL's ``SFTTrainer`` takes as they are: it only
packs them (``packing_strategy``) or pads them. Whatever is cut or left out is counted and logged.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_finetune.errors import DataError
from moe_finetune.sections import DataSection, Paths
from moe_finetune.training.mixture import SourceReader
from moe_finetune.training.rows import Form
from moe_finetune.training.sources import Row
from moe_finetune.training.tokenize import IGNORED, set_chat_template, tokenize_row

if TYPE_CHECKING:
    from datasets import Dataset

OURS = ("messages", "prompt", "completion", "text")
log = logging.getLogger(__name__)


@dataclass
class Counts:
    """What became of the rows of one dataset; ``tokens`` and ``learned`` are of the rows kept."""

    rows: int
    tokens: int
    learned: int
    dropped: int
    truncated: int
    cut: int
    rewritten: int
    straddled: int

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


def load_dataset_for(
    data: DataSection, tokenizer: Any, seed: int
) -> tuple[Dataset, Dataset | None]:
    """Training and validation examples with ``input_ids`` and ``labels`` (-100: not learned).

    Sets the tokenizer's chat template when ``data.chat_template`` names one. The training rows are
    shuffled with ``data.seed``, or ``seed`` when that is unset; validation keeps the file's order.

    Raises:
        DataError: a file, line or row that cannot be used, or nothing left to train on.
    """
    set_chat_template(tokenizer, data.chat_template)
    order = data.seed if data.seed is not None else seed
    train = prepare(data.train, data, tokenizer, "train").shuffle(order)
    validation = None
    if data.validation is not None:
        validation = prepare(data.validation, data, tokenizer, "validation")
    return train, validation


def prepare(sources: Paths, data: DataSection, tokenizer: Any, name: str) -> Dataset:
    """Read, tokenize and cut the rows of ``sources``, in their order; log what became of them."""
    from datasets import Dataset

    places, rows = _read(sources, data)
    columns = {field: [row.get(field) for row in rows] for field in OURS}
    tokenized = Dataset.from_dict(columns).map(
        _tokenize,
        with_indices=True,
        fn_kwargs={"tokenizer": tokenizer, "data": data, "places": places},
        num_proc=data.num_proc,
        remove_columns=list(OURS),
        load_from_cache_file=False,
        desc=f"Tokenizing {name}",
    )
    whole = tokenized.with_format("numpy")
    kept = tokenized.select([i for i, dropped in enumerate(whole["dropped"]) if not dropped])
    summary, *losses = count(tokenized).lines(data.max_length)
    log.info("%s data: %s", name, summary)
    for loss in losses:
        log.warning("%s data: %s", name, loss)
    if not len(kept):
        raise DataError(
            f"data.{name}: none of the {len(rows)} rows has anything to learn within "
            f"data.max_length {data.max_length}; raise it"
        )
    return kept.select_columns(["input_ids", "labels"])


def _read(sources: Paths, data: DataSection) -> tuple[list[str], list[Row]]:
    places: list[str] = []
    rows: list[Row] = []
    for source in [sources] if isinstance(sources, str) else sources:
        reader = SourceReader.of(source, data)
        path, before = reader.source.path, len(rows)
        for place, row in reader:
            if data.limit is not None and len(rows) >= data.limit:
                break
            rows.append(row)
            places.append(place)
        if len(rows) == before and (data.limit is None or before < data.limit):
            raise DataError(f"{path} is empty; wanted at least one row")
        _check_form(path, reader.former.form, data)
    if not rows:
        raise DataError("data.train is an empty list; name a file, folder or hub dataset")
    return places, rows


def _check_form(source: str, form: Form | str, data: DataSection) -> None:
    if form == "text" and data.completion_only_loss:
        raise DataError(f"{source} holds texts, which data.completion_only_loss=true cannot mask")
    if form != "text" and data.packing and data.packing_strategy != "bfd":
        raise DataError(
            f"{source} holds {form}, and data.packing_strategy '{data.packing_strategy}' cuts "
            "examples apart; use 'bfd'"
        )


def _tokenize(
    row: Row, index: int, tokenizer: Any, data: DataSection, places: list[str]
) -> dict[str, Any]:
    """One row's ids and labels within ``max_length``, and what was lost."""
    try:
        tokens = tokenize_row(row, tokenizer, data.completion_only_loss is not False)
    except DataError as error:
        raise DataError(f"{places[index]}: {error}") from error
    splits = data.packing and data.packing_strategy != "bfd"
    cut = 0 if splits else max(0, len(tokens.input_ids) - data.max_length)
    if cut and data.overlong == "error":
        raise DataError(
            f"{places[index]}: {len(tokens.input_ids)} tokens, longer than data.max_length "
            f"{data.max_length}; raise it, or set data.overlong to truncate or drop"
        )
    end = len(tokens.input_ids) - cut
    labels = tokens.labels[:end]
    learned = sum(label != IGNORED for label in labels)
    dropped = not learned or bool(cut and data.overlong == "drop")
    return {
        "input_ids": tokens.input_ids[:end],
        "labels": labels,
        "learned": learned,
        "dropped": dropped,
        "cut": 0 if dropped else cut,
        "rewritten": tokens.rewritten,
        "straddled": tokens.straddled,
    }


def count(tokenized: Dataset) -> Counts:
    """Totals over the rows that :func:`prepare` has tokenized."""
    columns = tokenized.remove_columns(["input_ids", "labels"]).with_format("numpy")[:]
    kept = ~columns["dropped"]
    lengths = np.fromiter(map(len, tokenized["labels"]), int, len(tokenized))
    return Counts(
        rows=len(tokenized),
        tokens=int(lengths[kept].sum()),
        learned=int(columns["learned"][kept].sum()),
        dropped=int(columns["dropped"].sum()),
        truncated=int((columns["cut"] > 0).sum()),
        cut=int(columns["cut"].sum()),
        rewritten=int(columns["rewritten"].sum()),
        straddled=int(columns["straddled"].sum()),
    )
