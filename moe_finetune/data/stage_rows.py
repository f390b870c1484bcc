"""Rows of stages that learn from preferences, labels or prompts, checked and brought into form.

Forms: ``{"prompt", "chosen", "rejected"}``, ``{"prompt", "completion", "label"}`` and ``{"prompt",
...}`` with whatever other fields a reward reads. A text is taken as it is; a list of ``{"role",
"content"}`` turns goes through the chat template. A row that has none of them is refused with its
file and line.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_finetune.data.examples import Examples, load_examples
from moe_finetune.data.readers import SourceReader, draw
from moe_finetune.data.rows import ROLES, renamed
from moe_finetune.data.tokenize import set_chat_template, tokenize_row
from moe_finetune.errors import DataError, did_you_mean
from moe_finetune.io.rows import Placed, Row, short
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.sections import DataSection, DataSource, Paths
from moe_finetune.recipe.stages import STAGES, Stage

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)
FIELDS: dict[str, tuple[str, ...]] = {
    "preference": ("prompt", "chosen", "rejected"),
    "unpaired": ("prompt", "completion", "label"),
    "prompts": ("prompt",),
}
MEASURED = 256
"""Rows of a source that routing is measured on."""


class StageFormer:
    """Brings the rows of one source into a stage's form.

    Args:
        stage: which form.
        columns: our field -> the file's field.
    """

    def __init__(self, stage: Stage, columns: Mapping[str, str] | None = None):
        self.form: str = stage.form
        self.detected = ""
        self.columns = columns or {}
        self._fields = FIELDS[stage.form]
        for field in self.columns:
            if field not in self._fields and stage.form != "prompts":
                raise DataError(f"data.columns.{field}: unknown{did_you_mean(field, self._fields)}")

    def __call__(self, place: str, row: Row) -> Row:
        """The row in its form; raise DataError with ``place`` when it has none."""
        row = renamed(place, row, self.columns)
        if self.form == "preference" and "prompt" not in row:
            row = {**row, **_common_prompt(place, row)}
        for field in self._fields:
            if field not in row:
                raise DataError(
                    f"{place}: no field '{field}', wanted {' and '.join(self._fields)}; the row "
                    f"has {', '.join(map(str, row)) or 'no fields'}. Name yours with data.columns"
                )
        texts = [field for field in self._fields if field != "label"]
        for field in texts:
            _check_text(f"{place}: '{field}'", row[field], answer=field != "prompt")
        if len({type(row[field]) for field in texts}) > 1:
            raise DataError(
                f"{place}: {', '.join(texts)} are texts and turns mixed; wanted all texts, or all "
                "lists of {role, content}"
            )
        if "label" in self._fields and not isinstance(row["label"], bool):
            raise DataError(f"{place}: 'label': wanted true or false, got {short(row['label'])}")
        if self.form == "preference" and row["chosen"] == row["rejected"]:
            raise DataError(f"{place}: 'chosen' and 'rejected' are equal; nothing is preferred")
        return row if self.form == "prompts" else {field: row[field] for field in self._fields}


def _common_prompt(place: str, row: Row) -> Row:
    """Prompt and answers of two whole conversations: the turns that both begin with."""
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        return {}
    common = [a for a, b in itertools.takewhile(lambda pair: pair[0] == pair[1],
                                                zip(chosen, rejected, strict=False))]  # fmt: skip
    if not common or len(common) in (len(chosen), len(rejected)):
        raise DataError(
            f"{place}: 'chosen' and 'rejected' do not begin with the same turns and then differ; "
            "add the field 'prompt'"
        )
    cut = len(common)
    return {"prompt": common, "chosen": chosen[cut:], "rejected": rejected[cut:]}


def _check_text(where: str, value: Any, answer: bool) -> None:
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{where} is empty")
        return
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: wanted text or a list of turns, got {short(value)}")
    for number, turn in enumerate(value):
        if not isinstance(turn, dict) or not isinstance(turn.get("content"), str):
            raise DataError(f"{where}[{number}]: wanted {{role, content}}, got {short(turn)}")
        if turn.get("role") not in ROLES:
            role = turn.get("role")
            raise DataError(f"{where}[{number}]: role {role!r}{did_you_mean(str(role), ROLES)}")
    last = value[-1]["role"]
    if answer and last != "assistant":
        raise DataError(f"{where}: the last turn is from '{last}'; wanted the assistant's answer")
    if not answer and last == "assistant":
        raise DataError(f"{where}: ends with the assistant's turn; wanted what it answers to")


@dataclass
class _Kept:
    """Rows that stay, and what became of the others."""

    rows: list[Row]
    overlong: int = 0


def load_for_stage(recipe: Recipe, tokenizer: Any) -> Examples:
    """The examples of ``recipe``, in the form of its stage.

    Raises:
        DataError: see :func:`load_examples` and :func:`load_stage_rows`.
    """
    stage = STAGES[recipe.stage]
    if stage.form == "tokens":
        return load_examples(recipe.data, tokenizer, recipe.seed)
    room = 0
    if stage.form == "prompts":
        usual = next(
            field.default
            for field in dataclasses.fields(stage.config_class())
            if field.name == "max_completion_length"
        )
        room = recipe.trainer.get("max_completion_length", usual)
    return load_stage_rows(stage, recipe.data, tokenizer, recipe.seed, room)


def load_stage_rows(
    stage: Stage, data: DataSection, tokenizer: Any, seed: int, room: int = 0
) -> Examples:
    """Training and validation rows of a stage that tokenizes its own.

    Args:
        stage: whose form.
        data: the recipe's section.
        tokenizer: a fast tokenizer; gets the chat template that ``data`` names.
        seed: shuffles the training rows and draws those that a ``limit`` keeps.
        room: tokens that the trainer adds to a prompt.

    Returns:
        Rows with the stage's fields; ``sources`` have ``input_ids`` and ``labels`` of prompt and
        (chosen) answer, for measures of routing.

    Raises:
        DataError: a file, line or row that cannot be used, or nothing left to train on.
    """
    set_chat_template(tokenizer, data.chat_template)
    order = data.seed if data.seed is not None else seed
    train, parts = _read(stage, data.train, data, tokenizer, "train", order, room)
    validation = None
    if data.validation is not None:
        validation, parts = _read(stage, data.validation, data, tokenizer, "validation", 0, room)
    measured = [(path, _tokens(rows, tokenizer, data.max_length)) for path, rows in parts]
    return Examples(train.shuffle(order), validation, measured)


def _read(
    stage: Stage,
    sources: Paths,
    data: DataSection,
    tokenizer: Any,
    name: str,
    seed: int,
    room: int,
) -> tuple[Dataset, list[tuple[str, list[Row]]]]:
    from datasets import Dataset

    listed = [sources] if isinstance(sources, str) else [*sources]
    if not listed:
        raise DataError(f"data.{name} is an empty list; name a file, folder or hub dataset")
    kept, parts = _Kept([]), []
    for number, source in enumerate(listed):
        first = len(kept.rows)
        rows = _source(stage, source, data, seed + number)
        if data.limit is not None:
            rows = draw(rows, data.limit, seed, f"data.limit of data.{name}")
        path = source if isinstance(source, str) else source.path
        _keep(kept, rows, data, tokenizer, room)
        parts.append((path, kept.rows[first : first + MEASURED]))
    if not kept.rows:
        raise DataError(
            f"data.{name}: none of its rows fits data.max_length {data.max_length}; raise it"
        )
    log.info("%s data: %d rows of %s", name, len(kept.rows), " and ".join(FIELDS[stage.form]))
    if kept.overlong:
        log.warning(
            "%s data: %d rows are longer than data.max_length %d and were left out",
            name,
            kept.overlong,
            data.max_length,
        )
    try:
        return Dataset.from_list(kept.rows), parts
    except (TypeError, ValueError) as error:  # pyarrow's errors are ValueErrors or TypeErrors
        raise DataError(
            f"data.{name}: a field holds values of different kinds in different rows: {error}"
        ) from error


def _source(
    stage: Stage, source: str | DataSource, data: DataSection, seed: int
) -> Iterator[Placed]:
    if isinstance(source, str):
        source = DataSource(path=source)
    if source.template or data.template:
        raise DataError(
            f"data.template: stage {stage.name} takes fields as they are; use data.columns"
        )
    former: Any = StageFormer(stage, source.columns or data.columns)
    reader = SourceReader(source, former, source.split or data.split, seed)
    empty = True
    for placed in reader:
        empty = False
        yield placed
    if empty:
        raise DataError(f"{source.path} is empty; wanted at least one row")


def _keep(
    kept: _Kept, rows: Iterator[Placed], data: DataSection, tokenizer: Any, room: int
) -> None:
    """Add the rows that fit; a cut answer would change what is preferred, so none is cut."""
    for place, row in rows:
        length = max(len(ids) for ids in _rendered(place, row, tokenizer)) + room
        if length <= data.max_length:
            kept.rows.append(row)
        elif data.overlong == "error":
            raise DataError(
                f"{place}: {length} tokens, longer than data.max_length {data.max_length}; raise "
                "it, or set data.overlong: drop"
            )
        else:
            kept.overlong += 1


def _rendered(place: str, row: Row, tokenizer: Any) -> Iterator[list[int]]:
    """Token ids of the prompt with each of its answers, or of the prompt alone."""
    answers = [row[name] for name in ("chosen", "rejected", "completion") if name in row]
    prompt = row["prompt"]
    try:
        for answer in answers or [None]:
            if isinstance(prompt, str):
                yield tokenizer(prompt + (answer or ""))["input_ids"]
                continue
            if not tokenizer.chat_template:
                raise DataError(
                    f"{place}: chat messages, and the tokenizer has no chat template; name one "
                    "with data.chat_template"
                )
            text = tokenizer.apply_chat_template(
                prompt + (answer or []), tokenize=False, add_generation_prompt=answer is None
            )
            yield tokenizer(text, add_special_tokens=False)["input_ids"]
    except DataError:
        raise
    except Exception as error:  # templates raise what they like, through jinja
        raise DataError(f"{place}: the chat template refuses these messages: {error}") from error


def _tokens(rows: list[Row], tokenizer: Any, max_length: int) -> Dataset:
    """Ids and labels of prompt and first answer, as a supervised run would have them."""
    from datasets import Dataset

    made = []
    for row in rows:
        answer = row.get("chosen", row.get("completion"))
        if answer is None:
            (ids,) = _rendered("", row, tokenizer)
            made.append({"input_ids": ids, "labels": list(ids)})
            continue
        turns = isinstance(row["prompt"], list)
        formed = (
            {"messages": row["prompt"] + answer}
            if turns
            else {"prompt": row["prompt"], "completion": answer}
        )
        tokens = tokenize_row(formed, tokenizer, True)
        made.append(
            {"input_ids": tokens.input_ids[:max_length], "labels": tokens.labels[:max_length]}
        )
    return Dataset.from_list(made)
