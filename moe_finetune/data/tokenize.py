"""Turn a row into token ids and labels; -100 where a token is not learned.

Labels come from character spans of the rendered text (:mod:`moe_finetune.data.chat`), and the ids
are those of the whole text, as the model reads them.
"""

import copy
import datetime
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_finetune.data.chat import Answer, Conversation, RenderingError, Span, Template, limited
from moe_finetune.errors import DataError, did_you_mean
from moe_finetune.io.rows import Row
from moe_finetune.models.chat_template import (
    original,
    with_carried_variables,
)

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


@dataclass(frozen=True)
class Tokens:
    """One example: ``input_ids`` and ``labels`` of equal length, and what to report.

    ``rewritten``: the chat template renders some earlier answer differently once more turns
    follow, so that answer is not learned; ``lost_calls`` is the number of tool calls in such
    answers. ``straddled``: prompt and completion meet inside a token.
    ``unread``: fields of turns that the template does not read. ``endless``: the template ends some
    learned answer without a special token.
    """

    input_ids: list[int]
    labels: list[int]
    rewritten: bool = False
    lost_calls: int = 0
    straddled: bool = False
    unread: tuple[str, ...] = ()
    endless: bool = False


def set_chat_template(tokenizer: Any, name: str | None) -> None:
    """Give ``tokenizer`` the chat template ``name``, in place.

    Args:
        name: chatml, plain, a Jinja file, or ``training``: TRL's training variant of the
            tokenizer's template.

    Raises:
        DataError: ``name`` is neither a known name nor a file, or TRL has no variant.
    """
    if name is None:
        return
    if name == TRAINING:
        text = original(tokenizer.chat_template or "")
        marked = _marked(text)
        if marked is None:
            raise DataError(
                "data.chat_template: TRL has no training version of this tokenizer's template; "
                "leave the key out, or give a Jinja file"
            )
        tokenizer.chat_template = marked
        return
    if name in CHAT_TEMPLATES:
        tokenizer.chat_template = CHAT_TEMPLATES[name]
    elif Path(name).is_file():
        tokenizer.chat_template = Path(name).read_text(encoding="utf-8")
    else:
        raise DataError(
            f"data.chat_template: '{name}' is neither a file nor a known template"
            f"{did_you_mean(name, [*CHAT_TEMPLATES, TRAINING])}"
        )


def with_carried(tokenizer: Any) -> Any:
    """A copy of ``tokenizer`` whose chat templates read tools and variables from the first turn.

    Most of TRL's trainers pass only the turns of a row to a template.
    """
    return _with_templates(tokenizer, with_carried_variables)


def as_published(tokenizer: Any) -> Any:
    """A copy of ``tokenizer`` without the addition of :func:`with_carried`."""
    return _with_templates(tokenizer, original)


def _with_templates(tokenizer: Any, change: Callable[[str], str]) -> Any:
    copied, templates = copy.copy(tokenizer), tokenizer.chat_template
    if isinstance(templates, dict):
        copied.chat_template = {name: change(text) for name, text in templates.items()}
    elif templates:
        copied.chat_template = change(templates)
    return copied


def midnight() -> datetime.datetime:
    """The time that chat templates write: two renderings of a conversation must agree."""
    return datetime.datetime.combine(datetime.date.today(), datetime.time())


def tokenize_row(row: Mapping[str, Any], tokenizer: Any, completion_only: bool) -> Tokens:
    """Token ids and labels of a formed row, see :func:`tokenize_rows`."""
    return next(iter(tokenize_rows([row], tokenizer, completion_only)))


def tokenize_rows(
    rows: Sequence[Mapping[str, Any]], tokenizer: Any, completion_only: bool
) -> Iterator[Tokens]:
    """Yield token ids and labels of formed rows (see :mod:`moe_finetune.data.rows`).

    In a chat every assistant turn is learned, with its calls and end-of-turn token; in a prompt and
    completion, the completion and the end-of-text token; in a text, everything. With
    ``completion_only=False`` all is learned except answers with ``train: False``.

    Raises:
        DataError: the chat template is missing, refuses the messages, omits a part of them or
            does not render a prompt as the beginning of the whole.
    """
    added = frozenset(tokenizer.added_tokens_decoder)
    for row in rows:
        if row.get("messages") is not None:
            with _conversation(row, tokenizer) as conversation:
                tokens = _chat(conversation, tokenizer, completion_only, added)
            yield tokens
        elif row.get("text") is not None:
            yield _plain("", row["text"], tokenizer, False)
        else:
            yield _plain(row["prompt"], row["completion"], tokenizer, completion_only)


def rendered(row: Mapping[str, Any], tokenizer: Any, prompt: bool = False) -> tuple[str, list[Row]]:
    """The text of ``messages``, and the turns in the form that the chat template accepts.

    Args:
        row: ``messages``, ``tools`` and ``variables``, see :mod:`moe_finetune.data.turns`.
        prompt: end with the generation prompt.

    Raises:
        TemplateLimitError: the chat template exceeds its limits of time or memory.
        DataError: the chat template is missing, refuses the messages or omits a part of them.
    """
    with _conversation(row, tokenizer, prompt) as conversation:
        conversation.check(conversation.answers())
        return conversation.text, conversation.turns


@contextmanager
def _conversation(
    row: Mapping[str, Any], tokenizer: Any, prompt: bool = False
) -> Iterator[Conversation]:
    """Context with the row in the chat template's form; its errors become DataErrors."""
    if not tokenizer.chat_template:
        raise DataError(
            "the data are chat messages, but the tokenizer has no chat template; choose one "
            f"with data.chat_template ({', '.join(CHAT_TEMPLATES)}, or a Jinja file)"
        )
    try:
        text = tokenizer.get_chat_template(None, row.get("tools") or None)
    except ValueError as error:
        raise DataError(f"the tokenizer's chat templates cannot be read: {error}") from error
    tokens = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    template = Template(text, _marked(text), {**tokens, "strftime_now": midnight().strftime})
    extra = {**(row.get("variables") or {}), "tools": row.get("tools") or None}
    with limited():
        try:
            yield Conversation(template, row["messages"], extra, prompt)
        except (DataError, MemoryError):
            raise
        except Exception as error:  # templates may raise anything
            raise DataError(str(error) or type(error).__name__) from error


@functools.lru_cache(maxsize=16)
def _marked(template: str) -> str | None:
    """The template, or TRL's variant of it, that marks the assistant's text."""
    from trl import chat_template_utils as known

    text = original(template)
    if known.has_generation_markers(text):
        return template
    ends = "_training_chat_template", "_chat_template"
    names = [name for name in vars(known) if name.endswith(ends[0])]
    for name in names:
        usual = getattr(known, name.removesuffix(ends[0]) + ends[1], None)
        if usual is not None and usual.strip() == text.strip():
            return template.removesuffix(text) + getattr(known, name)
    return None


def _plain(prompt: str, completion: str, tokenizer: Any, completion_only: bool) -> Tokens:
    text = prompt + completion
    encoded = tokenizer(text, return_offsets_mapping=True)
    ids, offsets = list(encoded["input_ids"]), list(encoded["offset_mapping"])
    end = tokenizer.eos_token_id
    if end is not None:
        if ids and ids[-1] == end:  # the tokenizer adds it, or the text has it
            ids, offsets = ids[:-1], offsets[:-1]
        ids.append(end)
        offsets.append((len(text), len(text) + 1))
    if not completion_only:
        return Tokens(ids, list(ids))
    spans = [(len(prompt), len(text) + 1)]
    straddled = any(a < len(prompt) < b for a, b in offsets)
    return Tokens(ids, _labels(ids, offsets, spans), straddled=straddled)


def _chat(
    conversation: Conversation, tokenizer: Any, completion_only: bool, added: Collection[int]
) -> Tokens:
    answers = conversation.answers()
    unread = tuple(conversation.check(answers))
    train = conversation.train
    learned = {i: answer for i, answer in answers.items() if train[i]}
    rewritten = [i for i, answer in learned.items() if answer.rewritten]
    last = len(conversation.turns) - 1
    if last in rewritten:
        raise RenderingError(
            "the chat template renders the turns before the last answer differently once the "
            "answer follows, so the answer cannot be located; choose another with "
            "data.chat_template, or set data.completion_only_loss=false"
        )
    encoded = tokenizer(conversation.text, return_offsets_mapping=True, add_special_tokens=False)
    ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    specials = [o for token, o in zip(ids, offsets, strict=True) if token in added]
    ends = [answer.pieces[-1][1] for answer in learned.values() if not answer.rewritten]
    # An added token that swallows the whitespace after it (rstrip) ends later than the answer.
    endless = not all(any(a < end <= b for a, b in specials) for end in ends)
    spans = {t: _spans(a for i, a in answers.items() if train[i] == t) for t in (True, False)}
    if completion_only:
        calls = sum(len(conversation.turns[i].get("tool_calls") or ()) for i in rewritten)
        labels = _labels(ids, offsets, spans[True])
        return Tokens(ids, labels, bool(rewritten), calls, unread=unread, endless=endless)
    others = _labels(ids, offsets, spans[False])
    labels = [t if other == IGNORED else IGNORED for t, other in zip(ids, others, strict=True)]
    return Tokens(ids, labels, unread=unread, endless=endless)


def _spans(answers: Iterable[Answer]) -> list[Span]:
    return [span for answer in answers if not answer.rewritten for span in answer.pieces]


def _labels(ids: list[int], offsets: Sequence[Span], spans: Iterable[Span]) -> list[int]:
    """``ids`` where a token's characters overlap a span, else -100."""
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    inside = np.zeros(len(ids), dtype=bool)
    for first, last in spans:
        inside |= (starts < last) & (ends > first)
    return np.where(inside, ids, IGNORED).tolist()
