"""Answers located by rendering every prefix of a conversation, which the fast way must equal."""

import os

from moe_finetune.data.answers import Answer
from moe_finetune.data.chat import Conversation


def answers(conversation: Conversation) -> dict[int, Answer]:
    """The assistant's turns by index, each from renderings that end before and after it."""
    tagged = conversation.tagged()
    return {
        i: _answer(conversation, i, tagged)
        for i, turn in enumerate(conversation.turns)
        if turn["role"] == "assistant"
    }


def _answer(conversation: Conversation, index: int, tagged) -> Answer:
    turns, text = conversation.turns, conversation.text
    until = text if index == len(turns) - 1 else conversation.render(turns[: index + 1])
    end = len(until.rstrip())
    rewritten = text[:end] != until[:end]
    opened = conversation.render(turns[:index], True)
    start = len(opened)
    if not until.startswith(opened):
        shared = os.path.commonprefix([opened, until])
        length_before = len(conversation.render(turns[:index]).rstrip())
        if len(shared) < length_before:
            return Answer([], True)
        tag = shared.rfind("<", length_before)
        start = tag if tag > shared.rfind(">") else len(shared)
    if start >= end:
        return Answer([], True)
    inside = [(max(a, start), b) for a, b in tagged if a < end and b > start]
    if rewritten or not inside:
        return Answer([(start, end)], rewritten)
    return Answer([*inside[:-1], (inside[-1][0], end)], False)
