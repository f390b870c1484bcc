"""Whether a server renders a chat and splits a text into tokens as the folder's tokenizer does."""

from __future__ import annotations

from typing import Any, Literal

from moe_finetune.errors import EvaluationError
from moe_finetune.models.tokenizer import Tokenizer
from moe_finetune.served.client import Served
from moe_finetune.vllm.openai_server import BadReply, ServerError, only_choice

CHAT = (
    {"role": "user", "content": "Which experts answer this?"},
    {"role": "assistant", "content": "Two of eight."},
    {"role": "user", "content": " And this,\n with 31 words?"},
)
TEXT = "Which experts answer this?  Two of 8."
Rendering = Literal["same", "another", "not compared"]
_MISSING = (400, 404, 405, 422, 501)
"""No such address, or one that takes other fields than vLLM's (SGLang, TGI)."""


def compare_rendering(served: Served, tokenizer: Tokenizer) -> tuple[Rendering, str]:
    """Compare one chat's tokens, and one text's, and say what was compared.

    vLLM and llama.cpp split texts at ``/tokenize``, and vLLM renders chats there; elsewhere the
    number of prompt tokens that a chat's answer reports is compared.
    """
    expected = _rendered(tokenizer)
    chat: list[int] | int | None
    try:
        chat = _tokenize(served, messages=list(CHAT), add_generation_prompt=True)
        how = "tokens"
        if chat is None:
            chat, how = _counted(served), "token count"
    except ServerError as error:
        if expected is None and error.status == 400:
            return "same", "neither side has a chat template"
        return "not compared", f"the server does not render a chat ({error})"
    except BadReply as error:
        return "not compared", str(error)
    if expected is None:
        return "another", "the server renders a chat, but the folder has no chat template"
    by_folder = expected if isinstance(chat, list) else len(expected)
    if chat != by_folder:
        sizes = len(chat) if isinstance(chat, list) else chat, len(expected)
        return "another", f"a chat is {sizes[0]} tokens on the server and {sizes[1]} by the folder"
    try:
        split = _tokenize(served, prompt=TEXT)
    except (ServerError, BadReply):
        split = None
    if split is not None and split != tokenizer(TEXT)["input_ids"]:
        return "another", "the server splits a text into other tokens than the folder's tokenizer"
    return "same", f"{how} of a chat"


def _rendered(tokenizer: Tokenizer) -> list[int] | None:
    """The folder's tokens of :data:`CHAT`; None without a template."""
    if not tokenizer.chat_template:
        return None
    try:
        chat = tokenizer.apply_chat_template(
            list(CHAT), add_generation_prompt=True, return_dict=True
        )
    except Exception as error:  # a template may raise anything
        raise EvaluationError(
            f"the folder's chat template cannot render a chat ({error}); check it with 'preview'"
        ) from None
    return list(chat["input_ids"])


def _tokenize(served: Served, **request: Any) -> list[int] | None:
    """Token ids from the server's ``/tokenize``; None where it has none that takes this."""
    url = served.url.removesuffix("/v1") + "/tokenize"
    try:
        reply = served.post(url, {"model": served.model, **request})
    except ServerError as error:
        if error.status in _MISSING:
            return None
        raise
    tokens = reply.get("tokens") if isinstance(reply, dict) else None
    if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
        return None
    # llama.cpp ignores messages and splits nothing.
    return tokens or None


def _counted(served: Served) -> int:
    """The number of prompt tokens that a chat's answer reports."""
    body = {"model": served.model, "messages": list(CHAT), "max_tokens": 1, "temperature": 0}
    reply = served.post(f"{served.url}/chat/completions", body)
    only_choice(reply)
    usage = reply.get("usage")
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if type(count) is not int:
        raise BadReply("the server reports no number of prompt tokens")
    return count
