"""Tokenize rows into a dataset on disk, and count what was truncated and dropped."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_finetune.data.chat import RenderingError
from moe_finetune.data.readers import DROP_REMEDY, Rows, malformed_line
from moe_finetune.data.tokenize import IGNORED, Tokens, tokenize_rows
from moe_finetune.data.turns import as_text, each_answer, until_last_answer
from moe_finetune.errors import DataError
from moe_finetune.io.rows import Row
from moe_finetune.recipe.data import DataSection

COLUMNS = ("input_ids", "labels")
_READ = ("chat", "prompt", "completion", "text")
_BATCH = 64


@dataclass
class Counts:
    """Counts of one dataset's rows. ``tokens`` and ``learned`` are of kept rows, ``sources`` the
    number of kept rows of each source, in order. ``unread`` are columns and fields of turns that
    nothing reads; ``unanswered`` are rows whose turns after the last answer were dropped;
    ``malformed`` rows were dropped because they cannot be used, and ``rows`` does not count them.
    """

    rows: int
    tokens: int
    learned: int
    dropped: int
    unlearned: int
    truncated: int
    cut: int
    rewritten: int
    straddled: int
    sources: list[int]
    unread: list[str] = dataclasses.field(default_factory=list)
    endless: int = 0
    lost_calls: int = 0
    unanswered: int = 0
    malformed: int = 0
    first_malformed: str = ""

    def lines(self, max_length: int) -> list[str]:
        """Sentences for the log: the first always, the others if something was lost."""
        lines = [f"{self.rows} rows, {self.tokens} tokens, {self.learned} of them learned"]
        if self.truncated:
            lines.append(
                f"{self.truncated} rows are longer than data.max_length {max_length} and were "
                f"truncated by {self.cut} tokens in total"
            )
        if self.dropped:
            lines.append(
                f"{self.dropped} rows are longer than data.max_length {max_length} and were "
                "dropped (data.overlong is 'drop', or no learned token would remain)"
            )
        if self.unlearned:
            lines.append(f"{self.unlearned} rows have no answer to learn and were dropped")
        if self.malformed:
            lines.append(malformed_line(self.malformed, self.first_malformed))
        if self.unanswered:
            lines.append(
                f"{self.unanswered} rows end with turns that no answer follows; those turns were "
                "dropped"
            )
        if self.rewritten:
            calls = f", {self.lost_calls} tool calls among them," if self.lost_calls else ""
            lines.append(
                f"{self.rewritten} rows: the chat template renders earlier answers differently "
                f"once the conversation goes on; those answers{calls} are not learned "
                "(data.turns: each makes an example of every answer)"
            )
        if self.endless:
            lines.append(
                f"{self.endless} rows: the chat template ends an answer without a special token, "
                "so the model does not learn where to stop; data.chat_template: training adds the "
                "token where TRL has a version of the template, as for GLM-4.5; otherwise give a "
                "Jinja file"
            )
        if self.straddled:
            lines.append(
                f"{self.straddled} rows: prompt and completion meet inside one token, which is "
                "learned; end the prompt without a space to avoid it"
            )
        if self.unread:
            lines.append(f"not used: {', '.join(self.unread)}")
        return lines


def write_tokenized(
    rows: Rows,
    num_sources: int,
    data: DataSection,
    tokenizer: Any,
    name: str,
    folder: Path,
) -> Counts:
    """Tokenize ``rows`` into the dataset ``folder / "rows"``."""
    from datasets import Dataset, Features, Value
    from datasets.arrow_writer import ArrowWriter

    text, index, flag = Value("string"), Value("int32"), Value("bool")
    read = {"place": text, "source": index, "prompt": text, "completion": text, "text": text,
            "chat": text}  # fmt: skip
    with ArrowWriter(path=str(folder / "read.arrow"), features=Features(read)) as writer:
        unanswered = 0
        for source, location, complete in rows:
            row = _answered(complete, data)
            unanswered += row is not complete
            for example in _examples(row, data):
                values = {field: example.get(field) for field in _READ}
                if "messages" in example:
                    values["chat"] = _chat_text(location, example)
                writer.write({"place": location, "source": source, **values})
        writer.finalize()
    tokenized = Dataset.from_file(str(folder / "read.arrow")).map(
        _tokenize,
        fn_kwargs={"tokenizer": tokenizer, "data": data},
        batched=True,
        batch_size=_BATCH,
        num_proc=data.num_proc,
        remove_columns=["place", "source", *_READ],
        features=Features(
            {"input_ids": [index], "labels": [index], "source": index}
            | dict.fromkeys(("unread", "malformed"), text)
            | dict.fromkeys(("tokens", "learned", "cut", "lost_calls"), Value("int64"))
            | dict.fromkeys(("dropped", "unlearned", "rewritten", "straddled", "endless"), flag)
        ),
        cache_file_name=str(folder / "tokens.arrow"),
        new_fingerprint="tokens",  # hashing the tokenizer takes longer than tokenizing small data
        load_from_cache_file=False,
        desc=f"Tokenizing {name}",
    )
    columns = tokenized.remove_columns([*COLUMNS, "malformed"]).with_format("numpy")[:]
    problems = tokenized["malformed"][:]  # as text: NumPy gives every row the longest one's width
    first_malformed = next(filter(None, problems), "")
    malformed = np.array(list(map(bool, problems)))
    kept_rows = ~(columns["dropped"] | columns["unlearned"] | malformed)
    usable = int((~malformed).sum())
    if not usable:
        raise DataError(
            f"data.{name}: all {len(malformed)} rows are malformed; the first: {first_malformed}"
        )
    if columns["unlearned"].sum() == usable:
        raise DataError(
            f"data.{name}: none of the {usable} rows has an answer to learn; check the turns' "
            "roles and their train or weight fields"
        )
    if not kept_rows.any():
        raise DataError(
            f"data.{name}: none of the {usable} rows has a learned token within data.max_length "
            f"{data.max_length}; raise it"
        )
    chosen = tokenized if kept_rows.all() else tokenized.select(kept_rows.nonzero()[0])
    chosen.select_columns(list(COLUMNS)).save_to_disk(str(folder / "rows"))
    for file in folder.glob("*.arrow"):
        file.unlink()
    return Counts(
        rows=usable,
        tokens=int(columns["tokens"][kept_rows].sum()),
        learned=int(columns["learned"][kept_rows].sum()),
        dropped=int(columns["dropped"].sum()),
        unlearned=int(columns["unlearned"].sum()),
        truncated=int((columns["cut"] > 0).sum()),
        cut=int(columns["cut"].sum()),
        rewritten=int(columns["rewritten"].sum()),
        lost_calls=int(columns["lost_calls"].sum()),
        straddled=int(columns["straddled"].sum()),
        endless=int(columns["endless"].sum()),
        unanswered=unanswered,
        malformed=int(malformed.sum()),
        first_malformed=first_malformed,
        sources=np.bincount(columns["source"][kept_rows], minlength=num_sources).tolist(),
        unread=sorted({name for names in set(columns["unread"]) for name in names.splitlines()}),
    )


def _answered(row: Row, data: DataSection) -> Row:
    """The row without turns that nothing is learned from."""
    if "messages" not in row or data.completion_only_loss is False:
        return row
    return until_last_answer(row)


def _examples(row: Row, data: DataSection) -> list[Row]:
    return (each_answer(row) if data.turns == "each" and "messages" in row else []) or [row]


def _chat_text(location: str, row: Row) -> str:
    try:
        return as_text(row)
    except (TypeError, ValueError) as error:
        raise DataError(f"{location}: a value is neither text nor a number: {error}") from error


def _tokenize(
    batch: dict[str, list[Any]], tokenizer: Any, data: DataSection
) -> dict[str, list[Any]]:
    """Ids and labels of rows within ``max_length``, and what each row lost."""
    rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    formed = [{**row, **json.loads(row["chat"])} if row["chat"] else row for row in rows]
    tokenized: list[dict[str, Any]] = []
    while len(tokenized) < len(rows):
        rest = formed[len(tokenized) :]
        try:
            for tokens in tokenize_rows(rest, tokenizer, data.completion_only_loss is not False):
                tokenized.append(_within(tokens, rows[len(tokenized)], data))
        except DataError as error:
            row, message = rows[len(tokenized)], str(error)
            if not message.startswith(row["place"]):
                message = f"{row['place']}: {message}"
            refused = isinstance(error, RenderingError)
            if data.malformed != "drop" or not refused:
                remedy = DROP_REMEDY if refused and tokenized else ""
                raise DataError(message + remedy) from error
            nothing = _within(Tokens([], []), row, data)
            tokenized.append(nothing | {"malformed": message, "unlearned": False})
    return {name: [row[name] for row in tokenized] for name in tokenized[0]}


def _within(tokens: Tokens, row: Row, data: DataSection) -> dict[str, Any]:
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
    unlearned = all(label == IGNORED for label in tokens.labels)
    dropped = not unlearned and (not learned or bool(cut and data.overlong == "drop"))
    return {
        "input_ids": tokens.input_ids[:end],
        "labels": labels,
        "tokens": end,
        "learned": learned,
        "dropped": dropped,
        "unlearned": unlearned,
        "cut": 0 if dropped or unlearned else cut,
        "rewritten": tokens.rewritten,
        "lost_calls": tokens.lost_calls,
        "straddled": tokens.straddled,
        "endless": tokens.endless,
        "unread": "\n".join(tokens.unread),
        "malformed": "",
        "source": row["source"],
    }
