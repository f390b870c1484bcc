"""Turn a row into token ids and labels; -100 where a token is not learned.

Labels come from character spans of the rendered text (:mod:`moe_finetune.data.chat`), and the ids
are those of the whole text, as the model reads them.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_finetune.data.answers import answers_of, without_thoughts
from moe_finetune.data.chat import Conversation, RenderingError, Span, tagging_template
from moe_finetune.errors import DataError, did_you_mean
from moe_finetune.io.row_files import Row
from moe_finetune.models.config_and_tokenizer import load_tokenizer
from moe_finetune.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from moe_finetune.recipe.schema import Recipe

IGNORED = -100

CHAT_TEMPLATES = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "plain": (
        "{{ bos_token or '' }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
        "Assistant: {{ m['content'] }}{{ eos_token }}{% else %}"
        "{{ m['role'] | capitalize }}: {{ m['content'] }}\n\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
}
"""Templates for base models, by the name that ``data.chat_template`` takes."""
TRAINING = "training"
"""The name of TRL's training variant of a checkpoint's template."""


def run_tokenizer(recipe: "Recipe", folder: Path) -> Any:
    """The run's tokenizer, with ``trainer.eos_token`` as the end of its rows, as the trainer's."""
    tokenizer = load_tokenizer(recipe.model.tokenizer or folder)
    end = recipe.trainer.get("eos_token")
    if end in tokenizer.get_vocab():  # the trainer refuses another one on a toy
        tokenizer.eos_token = end
    return tokenizer


def set_chat_template(tokenizer: Tokenizer, name: str | None) -> None:
    """Give ``tokenizer`` a template in place: chatml, plain, a Jinja file, or TRL's ``training``
    variant of its own.
    """
    if name is None:
        return
    if name == TRAINING:
        variant = tagging_template(tokenizer, tokenizer.chat_template or "")
        if variant is None:
            raise DataError(
                "data.chat_template: TRL has no training version of this tokenizer's template; "
                "leave the key out, or give a Jinja file"
            )
        tokenizer.chat_template = variant
    elif name in CHAT_TEMPLATES:
        tokenizer.chat_template = CHAT_TEMPLATES[name]
    elif Path(name).is_file():
        tokenizer.chat_template = Path(name).read_text(encoding="utf-8")
    else:
        raise DataError(
            f"data.chat_template: '{name}' is neither a file nor a known template"
            f"{did_you_mean(name, [*CHAT_TEMPLATES, TRAINING])}"
        )


@dataclass(frozen=True)
class Tokens:
    """One example: ``input_ids`` and ``labels`` of equal length, and what to report.

    ``rewritten``: the chat template renders some earlier answer differently once more turns
    follow, so that answer is not learned. ``straddled``: prompt and completion meet inside a
    token. ``endless``: the template ends some learned answer without a special token.
    ``unlocated``: some answer is not learned, because the template refuses the turns before it.
    ``thoughtless``: some learned answer has no thoughts where the template opens a think block.
    ``delimited``: a text begins or ends with the special token that is otherwise added.
    """

    input_ids: list[int]
    labels: list[int]
    rewritten: bool = False
    straddled: bool = False
    endless: bool = False
    unlocated: bool = False
    thoughtless: bool = False
    delimited: bool = False


def tokenize_row(row: Mapping[str, Any], tokenizer: Tokenizer, completion_only: bool) -> Tokens:
    """Token ids and labels of a formed row (see :mod:`moe_finetune.data.row_forms`).

    In a chat every assistant turn is learned, with its calls and end-of-turn token; in a prompt and
    completion, the completion and the end-of-text token; in a text, everything. With
    ``completion_only=False`` all is learned except answers with ``train: False``.
    """
    if "messages" in row:
        return _chat(Conversation(row, tokenizer), tokenizer, completion_only)
    if "text" in row:
        return _plain("", row["text"], tokenizer, False)
    return _plain(row["prompt"], row["completion"], tokenizer, completion_only)


def rendered(
    row: Mapping[str, Any], tokenizer: Tokenizer, prompt: bool = False
) -> tuple[str, list[Row]]:
    """The text of ``messages``, and the turns in the form that the chat template accepts; with
    ``prompt`` it ends with the generation prompt.
    """
    conversation = Conversation(row, tokenizer, prompt)
    return conversation.text, conversation.turns


def _plain(prompt: str, completion: str, tokenizer: Tokenizer, completion_only: bool) -> Tokens:
    text = prompt + completion
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    ids, offsets = list(encoded["input_ids"]), list(encoded["offset_mapping"])
    beginning, end = beginning_of(tokenizer), tokenizer.eos_token_id
    begun = bool(ids) and ids[0] in beginning
    if not begun:
        ids, offsets = [*beginning, *ids], [(0, 0)] * len(beginning) + offsets
    written = len(text.rstrip())
    ended = end is not None and any(
        token == end and b == written for token, (_, b) in zip(ids, offsets, strict=True)
    )
    if end is not None and not ended:
        ids.append(end)
        offsets.append((len(text), len(text) + 1))
    if not completion_only:
        return Tokens(ids, list(ids), delimited=begun or ended)
    straddled = any(a < len(prompt) < b for a, b in offsets)
    labels = _labels(ids, offsets, [(len(prompt), len(text) + 1)])
    return Tokens(ids, labels, straddled=straddled, delimited=begun or ended)


@functools.lru_cache(maxsize=4)
def beginning_of(tokenizer: Tokenizer) -> list[int]:
    """The ids that the tokenizer puts before a text."""
    for text in ("a", "0", "."):  # one that the vocabulary has
        if plain := tokenizer(text, add_special_tokens=False)["input_ids"]:
            ids = tokenizer(text)["input_ids"]
            return ids[: next(i for i in range(len(ids)) if ids[i : i + len(plain)] == plain)]
    return []


def _chat(conversation: Conversation, tokenizer: Tokenizer, completion_only: bool) -> Tokens:
    answers, train = answers_of(conversation), conversation.train
    learned = {i: answer for i, answer in answers.items() if train[i]}
    rewritten = [i for i, answer in learned.items() if answer.rewritten]
    unlocated = [i for i, answer in answers.items() if not answer.pieces and not answer.rewritten]
    if not completion_only and not all(train[i] for i in unlocated):
        raise RenderingError(
            "an answer with train: false cannot be located, because the chat template refuses the "
            "turns before it; choose another with data.chat_template"
        )
    if len(train) - 1 in rewritten:
        raise RenderingError(
            "the chat template renders the turns before the last answer differently once the "
            "answer follows, so the answer cannot be located; choose another with "
            "data.chat_template, or set data.completion_only_loss=false"
        )
    encoded = tokenizer(conversation.text, return_offsets_mapping=True, add_special_tokens=False)
    ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    turn_ends = _ends_of_turns(tokenizer)
    specials = [o for token, o in zip(ids, offsets, strict=True) if token in turn_ends]
    known = [answer for answer in learned.values() if answer.pieces and not answer.rewritten]
    ends = [answer.pieces[-1][1] for answer in known]
    # An added token that swallows the whitespace after it (rstrip) ends later than the answer.
    endless = not all(any(a < end <= b for a, b in specials) for end in ends)
    chosen = {
        flag: _labels(ids, offsets, (span for i, answer in answers.items() if train[i] == flag
                                     and not answer.rewritten for span in answer.pieces))
        for flag in (True, False)
    }  # fmt: skip
    if completion_only:
        return Tokens(
            ids,
            chosen[True],
            bool(rewritten),
            endless=endless,
            unlocated=any(train[i] for i in unlocated),
            thoughtless=any(without_thoughts(conversation.text, answer) for answer in known),
        )
    labels = [t if o == IGNORED else IGNORED for t, o in zip(ids, chosen[False], strict=True)]
    return Tokens(ids, labels, endless=endless)


def ends_a_turn(ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether an answer's last token but white space can end a turn."""
    ends = _ends_of_turns(tokenizer)
    for token in reversed(ids):
        if token in ends or tokenizer.decode([token]).strip():
            return token in ends
    return False


@functools.lru_cache(maxsize=4)
def _ends_of_turns(tokenizer: Tokenizer) -> frozenset[int]:
    """The added tokens but closing tags, which another part of the same turn may follow.

    GLM writes nothing behind ``</tool_call>``, and a model that never saw an end there calls again.
    """
    added = tokenizer.added_tokens_decoder  # which is made anew each time
    return frozenset(
        token for token, text in added.items() if text.special or not str(text).startswith("</")
    )


def _labels(ids: list[int], offsets: Sequence[Span], spans: Iterable[Span]) -> list[int]:
    """``ids`` where a token's characters overlap a span, else -100."""
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    inside = np.zeros(len(ids), dtype=bool)
    for first, last in spans:
        inside |= (starts < last) & (ends > first)
    return np.where(inside, ids, IGNORED).tolist()
