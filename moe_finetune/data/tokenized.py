"""Rows as token ids and labels in a dataset on disk, and what became of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_finetune.data.tokenize import IGNORED, tokenize_row
from moe_finetune.errors import DataError
from moe_finetune.io.rows import Placed, Row
from moe_finetune.recipe.sections import DataSection

COLUMNS = ("input_ids", "labels")
_READ = ("source", "messages", "prompt", "completion", "text")


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


def write_tokenized(
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
