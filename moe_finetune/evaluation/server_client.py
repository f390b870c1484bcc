"""lm-eval's client of completion servers, with every reply checked before it is scored."""

from __future__ import annotations

import asyncio
import copy
import time
from typing import Any

from lm_eval.models.openai_completions import LocalCompletionsAPI

from moe_finetune.errors import EvaluationError
from moe_finetune.evaluation import exchange
from moe_finetune.evaluation.exchange import ServerError

REQUEST_SECONDS = 300
# Of all tries of one request, the waits between them included.
PATIENCE_SECONDS = 900
_TRIES = 4
# float32's rounding of a log-softmax may leave a certain token a little above 0.
_ROUNDING = 1e-3
_LOWEST = 1e30


class BadReply(EvaluationError):
    """A reply that cannot be scored.

    Attributes:
        asked: what lm-eval asked for, (prompt, continuation or arguments); None for a window of a
            rolling request.
    """

    def __init__(self, message: str, asked: tuple[Any, ...] | None = None):
        super().__init__(message)
        self.asked = asked


class CheckedCompletions(LocalCompletionsAPI):
    """Asks a completion server; see :class:`LocalCompletionsAPI` for the arguments."""

    async def get_batched_requests(
        self,
        requests: list[Any],
        cache_keys: list[Any],
        *,
        generate: bool = True,
        ctxlens: list[int] | None = None,
        gen_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[list[Any]]:
        """Ask for all ``requests``, some at a time; one list of one reply for each of them."""
        slots = asyncio.Semaphore(self._concurrent)
        lengths: list[int | None] = [*ctxlens] if ctxlens is not None else [None] * len(requests)

        async def one(tokens: list[int], asked: Any, context: int | None) -> list[Any]:
            payload = self._create_payload(
                self.create_message([tokens]),
                generate=generate,
                gen_kwargs=copy.deepcopy(gen_kwargs),
                seed=self._seed,
                eos=self.eos_string,
                **kwargs,
            )
            async with slots:
                reply = await self._insist(client, payload)
            try:
                choice = only_choice(reply)
                return [text(choice) if context is None else score(choice, len(tokens), context)]
            except BadReply as error:
                error.asked = asked
                raise

        async with exchange.session() as client, asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(one(*request))
                for request in zip(requests, cache_keys, lengths, strict=True)
            ]
        return [task.result() for task in tasks]

    async def _insist(self, client: Any, payload: dict[str, Any]) -> Any:
        deadline = time.monotonic() + PATIENCE_SECONDS
        for attempt in range(_TRIES):
            left = deadline - time.monotonic()
            try:
                return await exchange.exchange(
                    client, self.base_url, payload, self.api_key, min(REQUEST_SECONDS, left)
                )
            except ServerError as error:
                if attempt + 1 == _TRIES:
                    raise
                await asyncio.sleep(error.pause(attempt, deadline - time.monotonic()))
        raise AssertionError("the last try returns or raises")


def only_choice(reply: Any) -> dict[str, Any]:
    """Return the choice of a reply to one prompt.

    Raises:
        BadReply: not one choice with index 0.
    """
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or not all(isinstance(c, dict) for c in choices):
        raise BadReply("the reply has no list of choices")
    indices = [choice.get("index") for choice in choices]
    if indices != [0] or isinstance(indices[0], bool):
        raise BadReply(f"the reply to one prompt has choices of index {indices}, not [0]")
    return choices[0]


def text(choice: dict[str, Any]) -> str:
    """Return a generation's text.

    Raises:
        BadReply: it is not a text.
    """
    found = choice.get("text")
    if not isinstance(found, str):
        raise BadReply(f"text is {found!r:.40}")
    return found


def score(choice: dict[str, Any], tokens: int, context: int) -> tuple[float, bool]:
    """Return the sum of log-probabilities (nats) of a continuation, and whether it is greedy.

    Args:
        choice: echoed prompt with log-probabilities, and one generated token.
        tokens: tokens that were sent; the last ``tokens - context`` are the continuation.
        context: tokens before it.

    Raises:
        BadReply: log-probabilities are missing, too few, too many, no numbers, not finite or
            positive; the best token of a position is less likely than the prompt's.
    """
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        raise BadReply("logprobs are missing")
    for name in ("token_logprobs", "top_logprobs"):
        values = logprobs.get(name)
        # The server generates one token after those that it was sent.
        if not isinstance(values, list) or len(values) != tokens + 1:
            count = len(values) if isinstance(values, list) else "no"
            raise BadReply(f"{name} has {count} entries for {tokens} tokens sent and 1 generated")
    total, greedy = 0.0, True
    for place in range(context, tokens):
        own = _log_probability(logprobs["token_logprobs"][place], place)
        best = logprobs["top_logprobs"][place]
        if not isinstance(best, dict) or not best:
            raise BadReply(f"top_logprobs[{place}] is {best!r:.40}")
        highest = max(_log_probability(value, place) for value in best.values())
        if highest < own - _ROUNDING:
            raise BadReply(f"top_logprobs[{place}] are below the token's own log-probability {own}")
        total += own
        greedy = greedy and own == highest
    return total, greedy


def _log_probability(value: Any, place: int) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadReply(f"log-probability {place} is {value!r:.40}")
    if not -_LOWEST <= value <= _ROUNDING:  # not so with NaN either
        raise BadReply(f"log-probability {place} is {value}, which is no logarithm of a share")
    return float(value)
