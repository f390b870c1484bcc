"""The characters of a rendered conversation that are learned.

The learned part of an answer is what the template writes after the generation prompt, up to the
end-of-turn mark, in the text in which the answer comes last; where the template marks the
assistant's text (``{% generation %}``), only that. An answer that the template renders differently
once the conversation goes on is not learned.
"""

import os
import re
from dataclasses import dataclass
from typing import Any

from moe_finetune.data.chat import Conversation, RenderingError, Span, limited
from moe_finetune.data.thought_tags import CLOSING
from moe_finetune.data.turns import REASONING

FEW = 12
"""Answers of a conversation that are all compared with renderings of their own."""
_CLOSED = re.compile(rf"\s*{CLOSING}")
_MARK = re.compile(r"qZ(\d+)([ab])Zq")


@dataclass(frozen=True)
class Answer:
    """An assistant's turn: where its text is, and whether that text changes with later turns.

    ``pieces`` is empty where the text is not known, as of an answer that opens a conversation.
    """

    pieces: list[Span]
    rewritten: bool


def without_thoughts(text: str, answer: Answer) -> bool:
    """Whether the answer's first token ends the thoughts that its prompt has opened."""
    return any(_CLOSED.match(text, start, end) is not None for start, end in answer.pieces[:1])


def answers_of(conversation: Conversation) -> dict[int, Answer]:
    """The assistant's turns of a conversation by index."""
    with limited():
        return _Answers(conversation).all()


class _Answers:
    """Compares the conversation with renderings that end before and after an answer.

    In a long conversation once for each kind of answer: those of one kind lie in the same way
    between the neighboring turns, whose places a rendering with marks in their contents shows.
    """

    def __init__(self, conversation: Conversation):
        self.conversation = conversation
        self.turns, self.text = conversation.turns, conversation.text
        self.indices = [i for i, turn in enumerate(self.turns) if turn["role"] == "assistant"]
        self.tagged = conversation.tagged()
        self.prefixes: dict[tuple[int, bool], str] = {}

    def all(self) -> dict[int, Answer]:
        few = len(self.indices) <= FEW
        gaps = {} if few else self._gaps()
        known: dict[Any, tuple[Span, Span]] = {}
        rewritten, answers = set(), {}
        for i in self.indices:
            kind = self._kind(i)
            if kind in rewritten:
                answers[i] = Answer([], True)
                continue
            answer = self._alike(gaps[i], *known[kind]) if i in gaps and kind in known else None
            if answer is None:
                answer = self._answer(i)
                if answer.rewritten and not few:
                    rewritten.add(kind)
                elif i in gaps and len(answer.pieces) == 1:
                    known[kind] = gaps[i], answer.pieces[0]
            answers[i] = answer
        return answers

    def _kind(self, index: int) -> Any:
        """What decides how a template begins and ends an answer: its fields, and its neighbors."""
        near = [
            (
                turn["role"],
                *(bool(turn.get(name)) for name in ("content", *REASONING)),
                len(turn.get("tool_calls") or ()),
            )
            for turn in self.turns[max(0, index - 2) : index + 3]
        ]
        asked_again = any(later["role"] == "user" for later in self.turns[index:])
        return min(index, 2), *near, asked_again, index == self.indices[-1]

    def _gaps(self) -> dict[int, Span]:
        """For each answer, where the content before it ends and the content after it begins."""
        turns = []
        for i, turn in enumerate(self.turns):
            content = turn.get("content")
            text = content[0]["text"] if isinstance(content, list) else content
            if text:
                text = f"qZ{i}aZq{text}qZ{i}bZq"
                parts = [{**content[0], "text": text}] if isinstance(content, list) else text
                turn = {**turn, "content": parts}
            turns.append(turn)
        try:
            marked = self.conversation.render(turns, self.conversation.prompt)
        except RenderingError:
            return {}
        if _MARK.search(self.text) or _MARK.sub("", marked) != self.text:
            return {}  # the template reads more of a content than it writes
        places: dict[tuple[int, str], int] = {}
        removed = 0
        for mark in _MARK.finditer(marked):
            places.setdefault((int(mark[1]), mark[2]), mark.start() - removed)
            removed += len(mark[0])
        places[-1, "b"], places[len(turns), "a"] = 0, len(self.text)
        return {
            i: (places[i - 1, "b"], places[i + 1, "a"])
            for i in self.indices
            if (i - 1, "b") in places and (i + 1, "a") in places
        }

    def _alike(self, gap: Span, known_gap: Span, known: Span) -> Answer | None:
        """The answer in ``gap`` if it lies there as the known answer lies in its own."""
        start, end = gap[0] + known[0] - known_gap[0], gap[1] + known[1] - known_gap[1]
        text, (first, last) = self.text, known_gap
        same = text[gap[0] : start] == text[first : known[0]]
        same = same and text[end : gap[1]] == text[known[1] : last]
        return Answer([(start, end)], False) if same and gap[0] <= start < end <= gap[1] else None

    def _prefix(self, count: int, prompt: bool = False) -> str:
        """The first ``count`` turns, rendered once."""
        if (count, prompt) not in self.prefixes:
            text = self.conversation.render(self.turns[:count], prompt)
            self.prefixes[count, prompt] = text
        return self.prefixes[count, prompt]

    def _answer(self, index: int) -> Answer:
        """Answer ``index`` with its end mark; without pieces where its text is not known."""
        text, last = self.text, index == len(self.turns) - 1
        try:
            until = text if last else self._prefix(index + 1)
            opened = self._prefix(index, True)
        except RenderingError:  # many templates accept no conversation that the assistant opens
            if len(self.tagged) != len(self.indices):
                return Answer([], False)
            return Answer([self._after_prompt(*self.tagged[self.indices.index(index)])], False)
        end = len(until.rstrip())
        if text[:end] != until[:end]:
            return Answer([], True)
        start = len(opened)
        if not until.startswith(opened):
            shared = os.path.commonprefix([opened, until])
            length_before = len(self._prefix(index).rstrip())
            if len(shared) < length_before:
                follows_another = last and self.turns[index - 1]["role"] == "assistant"
                return self._last(end) if follows_another else Answer([], True)
            # The prompt's `<think>` and the answer's `<tool_call>` share letters, not a tag.
            tag = shared.rfind("<", length_before)
            start = tag if tag > shared.rfind(">") else len(shared)
        if start >= end:
            return Answer([], True)
        inside = [(max(a, start), b) for a, b in self.tagged if a < end and b > start]
        if not inside:
            return Answer([(start, end)], False)
        # The end-of-turn mark belongs to the assistant, whether or not the template marks it.
        return Answer([*inside[:-1], (inside[-1][0], end)], False)

    def _generation_prompt(self) -> str:
        """What the template writes after the conversation so that an answer follows."""
        try:
            prompted = self._prefix(len(self.turns), True)
        except RenderingError:
            return ""
        return prompted.removeprefix(self.text) if prompted.startswith(self.text) else ""

    def _after_prompt(self, start: int, end: int) -> Span:
        """A tagged span without white space at its end and what the generation prompt writes."""
        text, prompt = self.text, self._generation_prompt()
        end = start + len(text[start:end].rstrip())
        for cut in range(len(prompt) + 1):
            if text.startswith(prompt[cut:], start) and text[:start].endswith(prompt[:cut]):
                return min(start + len(prompt) - cut, end), end
        return start, end

    def _last(self, end: int) -> Answer:
        """The last answer, after what looks like its generation prompt, if it is all there."""
        prompt, content = self._generation_prompt(), self.turns[-1].get("content") or ""
        start = self.text.rfind(prompt) + len(prompt) if prompt else end
        content = content[0]["text"] if isinstance(content, list) else content
        if content and start < end and content.strip() in self.text[start:end]:
            return Answer([(start, end)], False)
        return Answer([], True)
