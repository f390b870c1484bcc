"""The characters of a conversation that are learned: its answers in a chat template's text.

The learned part of an answer is what the template writes after the generation prompt, up to the
end-of-turn mark, in the text in which the answer comes last. If a template marks the assistant's
text (``{% generation %}``), or TRL has a marked copy that writes the same text, only marked
characters are learned. An answer that the template renders differently once the conversation goes
on is not learned.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_finetune.data.rendering import RenderingError, Span, Template, Turn
from moe_finetune.data.unread import UnreadFields, changed, kind_of


@dataclass(frozen=True)
class LearnedText:
    """The text of a conversation, and its learned characters.

    Attributes:
        spans: the character ranges of each learned answer.
        others: the character ranges of answers that are not learned.
        ends: where each learned answer ends.
        rewritten: whether the template renders an earlier answer differently.
        unread: fields that the template does not read.
    """

    text: str
    spans: list[Span]
    others: list[Span]
    ends: list[int]
    rewritten: bool
    unread: tuple[str, ...]


class Learner:
    """A chat template, its unread fields, and the kinds of answers already checked with it."""

    def __init__(self, template: Template):
        self.template = template
        self._unread = UnreadFields(template)
        self._checked_answers: set[Any] = set()

    def shown(
        self, turns: Sequence[Turn], extra: Mapping[str, Any], prompt: bool, checked: bool
    ) -> tuple[str, list[Turn]]:
        """The text of the conversation, and its turns in the form that the template accepts.

        Raises:
            RenderingError: the template refuses the turns or, if ``checked``, omits a part of
                them.
        """
        turns = self.template.adapted(turns)
        text = self.template.checked_render(turns, extra, prompt)
        if checked:
            list(self._unread.of(turns, extra))
        return text, turns

    def learned(self, turns: Sequence[Turn], extra: Mapping[str, Any]) -> LearnedText:
        """The text of the conversation, and its learned characters.

        Raises:
            RenderingError: the template refuses the turns or omits a part of them.
        """
        train = [turn.get("train", True) for turn in turns]
        turns = self.template.adapted(turns)
        text = self.template.checked_render(turns, extra)
        unread = tuple(sorted(set(self._unread.of(turns, extra))))
        marks = self.template.marks(turns, extra, text)
        answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        spans: list[list[Span]] = []
        others: list[list[Span]] = []
        rewritten = False
        for i in answers:
            pieces = self._answer(turns, i, extra, text, marks)
            if train[i]:
                rewritten |= pieces is None
                spans.append(pieces or [])
                self._check_own(turns, i, extra, pieces)
            elif pieces is not None:
                others.append(pieces)
        ends_with_answer = turns[-1]["role"] == "assistant"
        if rewritten and ends_with_answer and train[-1] and not spans[-1]:
            raise RenderingError(
                "the chat template renders the turns before the last answer differently once "
                "the answer follows, so the answer cannot be located; choose another with "
                "data.chat_template, or set data.completion_only_loss=false"
            )
        learned_spans, other_spans = (
            [span for pieces in answers_pieces for span in pieces]
            for answers_pieces in (spans, others)
        )
        ends = [pieces[-1][1] for pieces in spans if pieces]
        return LearnedText(text, learned_spans, other_spans, ends, rewritten, unread)

    def _answer(
        self,
        turns: Sequence[Turn],
        index: int,
        extra: Mapping[str, Any],
        text: str,
        marks: Sequence[Span],
    ) -> list[Span] | None:
        """Characters of answer ``index`` with its end mark; None if the text differs."""
        last = index == len(turns) - 1
        until = text if last else self.template.render(turns[: index + 1], extra)
        end = len(until.rstrip())
        if text[:end] != until[:end]:
            return None
        opened = self.template.checked_render(turns[:index], extra, True)
        start = len(opened)
        if not until.startswith(opened):
            shared = os.path.commonprefix([opened, until])
            length_before = len(self.template.render(turns[:index], extra).rstrip())
            if len(shared) < length_before:
                return None
            # The prompt's `<think>` and the answer's `<tool_call>` share letters, not a tag.
            tag = shared.rfind("<", length_before)
            start = tag if tag > shared.rfind(">") else len(shared)
        if start >= end:
            return None
        inside = [(max(a, start), b) for a, b in marks if a < end and b > start]
        if not inside:
            return [(start, end)]
        # The end-of-turn mark belongs to the assistant, whether or not the template marks it.
        return [*inside[:-1], (inside[-1][0], end)]

    def _check_own(
        self,
        turns: Sequence[Turn],
        index: int,
        extra: Mapping[str, Any],
        pieces: Sequence[Span] | None,
    ) -> None:
        """Refuse a template that writes the text of other turns into an answer."""
        previous_role = turns[index - 1]["role"] if index else ""
        key = (previous_role, *kind_of(turns[index]))
        if pieces is None or key in self._checked_answers:
            return
        altered = [
            changed(turn, "content") if turn["role"] != "assistant" else turn
            for turn in turns[: index + 1]
        ]
        try:
            now = self.template.render(turns[: index + 1], extra)
            other = self.template.render(altered, extra)
            marks = self.template.marks(altered, extra, other)
            moved = self._answer(altered, index, extra, other, marks)
        except Exception:  # the template checks the content of the other turns
            self._checked_answers.add(key)
            return
        ours = [now[a:b] for a, b in pieces]
        if moved is not None and [other[a:b] for a, b in moved] != ours:
            raise RenderingError(
                "the chat template writes other turns' text into the assistant's answer, where "
                "it would be learned; choose another with data.chat_template"
            )
        self._checked_answers.add(key)
