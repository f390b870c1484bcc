"""A row -> token ids and labels; -100 where a token is not learned.

Labels come from character spans of the rendered text. That needs nothing from the chat template
(TRL's ``assistant_only_loss`` needs ``{% generation %}`` tags, which most checkpoints lack), and
the ids are those of the whole text, as the model meets them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_finetune.errors import DataError, did_you_mean

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


@dataclass(frozen=True)
class Tokens:
    """One example: ``input_ids``, ``labels`` of equal length, and what the reader should know.

    ``rewritten``: the chat template renders some earlier answer differently once more turns
    follow, so that answer is not learned. ``straddled``: prompt and completion meet inside a token.
    """

    input_ids: list[int]
    labels: list[int]
    rewritten: bool = False
    straddled: bool = False


def set_chat_template(tokenizer: Any, name: str | None) -> None:
    """Give ``tokenizer`` the chat template ``name`` (chatml, plain, or a Jinja file), in place.

    Raises:
        DataError: neither a known name nor a file.
    """
    if name is None:
        return
    if name in CHAT_TEMPLATES:
        tokenizer.chat_template = CHAT_TEMPLATES[name]
    elif Path(name).is_file():
        tokenizer.chat_template = Path(name).read_text(encoding="utf-8")
    else:
        raise DataError(
            f"data.chat_template: '{name}' is neither a file nor a known template"
            f"{did_you_mean(name, CHAT_TEMPLATES)}"
        )


def tokenize_row(row: Mapping[str, Any], tokenizer: Any, completion_only: bool) -> Tokens:
    """Token ids and labels of a formed row (see :mod:`moe_finetune.data.rows`).

    A chat learns every assistant turn, its end-of-turn token included; a completion learns itself
    and the end-of-text token; a text learns everything. ``completion_only=False`` learns all.

    Raises:
        DataError: the chat template is missing, refuses the messages, or does not render a prompt
            as the beginning of the whole.
    """
    if row.get("messages") is not None:
        return _chat(row["messages"], tokenizer, completion_only)
    if row.get("text") is not None:
        return _plain("", row["text"], tokenizer, False)
    return _plain(row["prompt"], row["completion"], tokenizer, completion_only)


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


def _chat(messages: list[dict[str, str]], tokenizer: Any, completion_only: bool) -> Tokens:
    text = _render(messages, tokenizer, False)
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    if not completion_only:
        return Tokens(ids, list(ids))
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    spans = [_answer(messages, i, text, tokenizer) for i in answers]
    if spans[-1] is None:
        raise DataError(
            "the chat template does not render the conversation before the last answer as the "
            "beginning of the whole; name another with data.chat_template, or set "
            "data.completion_only_loss=false"
        )
    learned = [span for span in spans if span is not None]
    return Tokens(ids, _labels(ids, offsets, learned), rewritten=len(learned) < len(spans))


def _answer(
    messages: list[dict[str, str]], index: int, text: str, tokenizer: Any
) -> tuple[int, int] | None:
    """Characters of answer ``index`` up to its end-of-turn mark, None when history is rewritten."""
    prompt = _render(messages[:index], tokenizer, True)
    until = _render(messages[: index + 1], tokenizer, False)
    if not (text.startswith(until) and until.startswith(prompt)):
        return None
    return len(prompt), len(until.rstrip())


def _render(messages: list[dict[str, str]], tokenizer: Any, generation_prompt: bool) -> str:
    if not tokenizer.chat_template:
        raise DataError(
            "the data are chat messages and the tokenizer has no chat template; name one with "
            f"data.chat_template ({', '.join(CHAT_TEMPLATES)}, or a Jinja file)"
        )
    if not messages and not generation_prompt:
        return ""
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation_prompt
        )
    except Exception as error:  # templates raise what they like, through jinja
        raise DataError(f"the chat template refuses these messages: {error}") from error


def _labels(
    ids: list[int], offsets: list[tuple[int, int]], spans: list[tuple[int, int]]
) -> list[int]:
    """``ids`` where a token's characters reach into a span. A token has one place in the text."""
    labels = []
    for token, (start, end) in zip(ids, offsets, strict=True):
        inside = any(start < last and first < end for first, last in spans)
        labels.append(token if inside else IGNORED)
    return labels
