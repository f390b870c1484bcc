"""What happened to the rows of a dataset: flags of each, their counts, the log's sentences."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from moe_finetune.data.row_lengths import RowLengths
from moe_finetune.io.counted import counted, in_number

SENTENCES = {
    "truncated": "{rows} {are} longer than data.max_length {max_length} and {were} truncated by "
    "{cut} tokens in total",
    "dropped": "{rows} {are} longer than data.max_length {max_length} and {were} dropped "
    "(data.overlong is 'drop', or no learned token would remain)",
    "too_long": "{rows} {are} longer than data.max_length {max_length} and {were} dropped",
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
    "begun": "{texts} {begin} with the special token that TRL adds, so {they} {have} it twice; "
    "remove it from the texts",
}
"""What can happen to a row, and what the log says about it."""
FLAGS = {name: 1 << bit for bit, name in enumerate(SENTENCES)}
DROPPED = ("dropped", "too_long", "unlearned", "malformed")
"""Rows with one of these are not used."""

_OURS = "moe_finetune."  # a row of prompts may have columns of any name
TOKENS, LEARNED, CUT = f"{_OURS}tokens", f"{_OURS}learned", f"{_OURS}cut"
LARGEST, FLAG, PROBLEM = f"{_OURS}largest", f"{_OURS}flags", f"{_OURS}problem"
NUMBERS = (TOKENS, LEARNED, CUT, LARGEST, FLAG)
"""Columns that describe a row, not those that a trainer gets, with :data:`PROBLEM`, a text."""


def described(
    happened: Iterable[str],
    tokens: int = 0,
    learned: int = 0,
    cut: int = 0,
    largest: int = 0,
    problem: str = "",
) -> dict[str, Any]:
    """The columns that describe a row: its tokens, those learned and cut, and its largest id.

    Args:
        happened: names of :data:`SENTENCES`.
    """
    return {
        TOKENS: tokens,
        LEARNED: learned,
        CUT: cut,
        LARGEST: largest,
        FLAG: sum(FLAGS[name] for name in happened),
        PROBLEM: problem,
    }


@dataclass
class Counts:
    """Counts of one dataset's rows: ``rows`` that could be used, ``tokens`` and ``learned`` of kept
    rows and the ``longest`` of them, ``cut`` tokens, the ``largest`` id, kept rows of each source
    in order, rows to which something happened, columns that nothing reads, and sentences about
    ``turns``.
    """

    rows: int
    tokens: int
    learned: int
    longest: int
    cut: int
    largest: int
    sources: list[int]
    notes: dict[str, int]
    first_malformed: str = ""
    unread: list[str] = dataclasses.field(default_factory=list)
    turns: list[str] = dataclasses.field(default_factory=list)

    def lengths(self, max_length: int) -> RowLengths:
        """The lengths of the kept rows, of which packing may cut some."""
        return RowLengths(sum(self.sources), min(self.longest, max_length), self.tokens)

    def losses(self, max_length: int) -> list[str]:
        """Sentences for the log about what is lost."""
        values = {"max_length": max_length, "cut": self.cut, "first": self.first_malformed}
        names = ", ".join(sorted(self.unread))
        return [
            *(
                sentence_of(name, self.notes[name], **values)
                for name in SENTENCES
                if self.notes[name]
            ),
            *self.turns,
            *([f"not used: {names}"] if names else []),
        ]


def sentence_of(what: str, count: int, **values: Any) -> str:
    """The log's sentence about what happened to ``count`` rows."""
    texts = {"rows": counted(count, "row"), "texts": counted(count, "text")}
    return in_number(SENTENCES[what], count).format(**texts, **values)
