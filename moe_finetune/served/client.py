"""Ask a server for the log-probabilities of tokens, in the first way that it answers.

1. ``prompt_logprobs``: of the prompt's own tokens, as vLLM returns them.
2. ``echo`` with ``logprobs``: the prompt repeated with its log-probabilities (SGLang and others).
3. generated: of the tokens that the server generates greedily, whose ids it must report
   (llama.cpp); the reference then scores these tokens.

Prompts are token ids, so the server adds no beginning of its own.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from moe_finetune.errors import EvaluationError, did_you_mean
from moe_finetune.io.json_file import JsonError, parse_json
from moe_finetune.vllm.openai_server import (
    BadReply,
    ServerError,
    check_address,
    failure,
    key_header,
    log_probability,
    only_choice,
    server_models,
)

SECONDS = 120.0
"""How long a request may take; it is made once more if it takes longer or fails for a while."""
LONGEST_WAIT = 60.0
"""Seconds that a server may ask to wait (``Retry-After``) before the request is made once more."""
GENERATED = 32
"""Tokens that are generated where a server does not score its prompt."""
_NO_PROBABILITY = -9999.0
"""vLLM's number for minus infinity."""


@dataclass(frozen=True)
class Answer:
    """What a server says of one prompt.

    Attributes:
        ids: the prompt's tokens, and if the server scores only what it generates, these after them.
        first: position in ``ids`` of the first token that has a log-probability.
        logprobs: natural logarithms, raw (before temperature), of ``ids[first:]``; float64.
        next_token: the token that the server generated greedily after the prompt; None if the
            server does not report its id.
    """

    ids: list[int]
    first: int
    logprobs: np.ndarray
    next_token: int | None


class Served:
    """One model of a server.

    Args:
        url: the address, with or without ``/v1``.
        model: its name there; default: the server's only one.
        option, name_option: the options that gave the address, and may name the model.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        option: str = "--served",
        name_option: str | None = "--model",
    ):
        address = check_address(url, option)
        self.url = address if address.endswith("/v1") else f"{address}/v1"
        offered = server_models(self.url, f"check the address of {option}")
        names = ", ".join(sorted(offered)) or "no model"
        if model is None and len(offered) != 1:
            remedy = f"name one with {name_option}" if name_option else "let it serve only one"
            raise EvaluationError(f"{option}: the server at {self.url} offers {names}; {remedy}")
        self.model = next(iter(offered)) if model is None else model
        if self.model not in offered:
            raise EvaluationError(
                f"{option}: the server at {self.url} has no model '{model}'"
                f"{did_you_mean(self.model, offered)}; it offers {names}"
            )
        self._way: Callable[[Served, list[int]], Answer] | None = None

    @property
    def scores_prompts(self) -> bool:
        """Whether the server scores given tokens, and not only those that it generates."""
        return self._way is not _generated

    def answer(self, prompt: Sequence[int]) -> Answer:
        """Log-probabilities of a prompt of at least two tokens; see the module's docstring."""
        refusals = []
        for way in _WAYS if self._way is None else (self._way,):
            try:
                answer = way(self, list(prompt))
            except BadReply as error:
                refusals.append(f"{_WAYS[way]}: {error}")
            except ServerError as error:
                if error.transient or error.status in (401, 403):
                    raise EvaluationError(f"{self.url}, model '{self.model}': {error}") from None
                refusals.append(f"{_WAYS[way]}: {error}")
            else:
                self._way = way
                return answer
        raise EvaluationError(
            f"{self.url}, model '{self.model}': no log-probabilities that can be compared "
            f"({'; '.join(refusals)}); start the server so that it returns them, for example with "
            "'moe-finetune serve'"
        )

    def score(self, answer: Answer) -> np.ndarray:
        """This server's log-probabilities of the tokens of another's ``answer``, as a reference."""
        scored = self.answer(answer.ids)
        if not self.scores_prompts:
            raise EvaluationError(
                f"{self.url}: a reference must score given tokens (prompt_logprobs or echo), but "
                "this server scores only the tokens that it generates"
            )
        return scored.logprobs[answer.first - scored.first :]

    def complete(self, **request: Any) -> dict[str, Any]:
        """The only choice of a greedy completion."""
        body = {"model": self.model, "temperature": 0, "stream": False, **request}
        return only_choice(self.post(f"{self.url}/completions", body))

    def post(self, url: str, body: dict[str, Any]) -> Any:
        """The JSON that answers ``body``, sent to this server and never redirected."""
        try:
            return self._sent(url, body)
        except ServerError as error:
            if not error.transient:
                raise
            time.sleep(min(error.wait, LONGEST_WAIT))
            return self._sent(url, body)

    def _sent(self, url: str, body: dict[str, Any]) -> Any:
        try:
            response = httpx.post(url, json=body, headers=key_header(), timeout=SECONDS)
        except httpx.TimeoutException:
            raise ServerError(f"no answer within {SECONDS:g} s", transient=True) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerError(f"no answer ({error})", transient=True) from None
        if response.status_code != 200:
            raise failure(response.status_code, response.text, response.headers)
        try:
            return parse_json(response.content)
        except JsonError as error:
            raise ServerError(f"the answer is not JSON ({error})", status=200) from None


def _prompt_logprobs(served: Served, prompt: list[int]) -> Answer:
    """vLLM: ``[null, {"17": {"logprob": -1.5, ...}}, ...]``, of the prompt's tokens in order."""
    choice = served.complete(prompt=prompt, max_tokens=1, prompt_logprobs=0, return_token_ids=True)
    rows = choice.get("prompt_logprobs")
    if not isinstance(rows, list):
        raise BadReply("the reply has no prompt_logprobs")
    if len(rows) != len(prompt):
        raise BadReply(f"prompt_logprobs has {len(rows)} entries for {len(prompt)} tokens sent")
    values = []
    for position, token in enumerate(prompt[1:], 1):
        # A second entry, of the likeliest token, may lie next to the prompt's own.
        entry = rows[position].get(str(token)) if isinstance(rows[position], dict) else None
        if not isinstance(entry, dict):
            raise BadReply(f"prompt_logprobs[{position}] does not have the prompt's token {token}")
        values.append(_finite(entry.get("logprob"), position))
    generated = choice.get("token_ids")
    next_token = generated[0] if isinstance(generated, list) and generated else None
    return Answer(prompt, 1, np.array(values), next_token)


def _echo(served: Served, prompt: list[int]) -> Answer:
    """``token_logprobs`` of the prompt (the first is null) and of one generated token."""
    choice = served.complete(prompt=prompt, max_tokens=1, echo=True, logprobs=1)
    listed = choice.get("logprobs")
    values = listed.get("token_logprobs") if isinstance(listed, dict) else None
    if not isinstance(values, list) or len(values) not in (len(prompt), len(prompt) + 1):
        count = len(values) if isinstance(values, list) else "no"
        raise BadReply(f"token_logprobs has {count} entries for {len(prompt)} tokens sent")
    if values[0] is not None:  # of the second token, or of the first after an added beginning
        raise BadReply("token_logprobs[0] is not null, so it is open whose number each entry is")
    scored = [_finite(values[position], position) for position in range(1, len(prompt))]
    tokens = listed.get("tokens") if isinstance(listed, dict) else None
    token = _id_of(tokens[-1]) if isinstance(tokens, list) and len(tokens) > len(prompt) else None
    return Answer(prompt, 1, np.array(scored), token)


def _generated(served: Served, prompt: list[int]) -> Answer:
    """Tokens that the server generates, by id: ``logprobs.content`` or ``token_ids``."""
    choice = served.complete(prompt=prompt, max_tokens=GENERATED, logprobs=1, return_token_ids=True)
    listed = choice.get("logprobs")
    if not isinstance(listed, dict):
        raise BadReply("the reply has no logprobs")
    if isinstance(content := listed.get("content"), list):  # llama.cpp
        rows = [row if isinstance(row, dict) else {} for row in content]
        ids: list[Any] = [row.get("id") for row in rows]
        values: list[Any] = [row.get("logprob") for row in rows]
    else:
        values = _list(listed.get("token_logprobs"))
        ids = _list(choice.get("token_ids"))
        ids = ids or [_id_of(token) for token in _list(listed.get("tokens"))]
    if not values or len(ids) != len(values) or any(type(token) is not int for token in ids):
        raise BadReply(
            f"the reply has {len(values)} log-probabilities of generated tokens, and no id for each"
        )
    scored = [_finite(value, position) for position, value in enumerate(values, len(prompt))]
    return Answer([*prompt, *ids], len(prompt), np.array(scored), ids[0])


_WAYS: dict[Callable[[Served, list[int]], Answer], str] = {
    _prompt_logprobs: "prompt_logprobs",
    _echo: "echo",
    _generated: "generated tokens",
}


def _list(value: Any) -> list[Any]:
    """``value`` if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def _id_of(token: Any) -> int | None:
    """The id in vLLM's ``token_id:17``; None for a text, which several tokens may have."""
    match = re.fullmatch(r"token_id:(\d+)", token) if isinstance(token, str) else None
    return int(match[1]) if match else None


def _finite(value: Any, position: int) -> float:
    logprob = log_probability(value, position)
    if logprob <= _NO_PROBABILITY:
        raise BadReply(f"log-probability {position} is {logprob}, the number for minus infinity")
    return logprob
