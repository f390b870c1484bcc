"""A running server behind lm-eval's client; every reply is validated before it is scored.

A redirect is an error: the user did not choose the other address, and it must not get the key.
"""

import io
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, redirect_stderr
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from lm_eval.models.openai_completions import LocalCompletionsAPI

from moe_finetune.errors import EvaluationError, did_you_mean
from moe_finetune.io.checkpoint_files import read_config
from moe_finetune.io.environment import package_versions
from moe_finetune.io.hashes import checkpoint_hash, sha256_json
from moe_finetune.io.json_file import JsonError, parse_json

REQUEST_SECONDS, TRIES = 300, 4
# Rounding in float32 may give a token of probability 1 a log-probability slightly above 0.
_ROUNDING = 1e-3
_LOWEST = 1e30
_TRANSIENT = (408, 409, 425, 429, 500, 502, 503, 504)


class ServerError(EvaluationError):
    """A server refuses a request; ``transient`` if the same request may succeed later."""

    def __init__(self, message: str, transient: bool = False):
        super().__init__(message)
        self.transient = transient


class BadReply(EvaluationError):
    """A reply that cannot be scored; ``request`` is lm-eval's, None for a rolled window."""

    def __init__(self, message: str, request: tuple[Any, ...] | None = None):
        super().__init__(message)
        self.request = request


class _CheckedSession:
    """A client session that puts the server's text into errors and follows no redirects."""

    def __init__(self, session: Any):
        self._session = session

    @asynccontextmanager
    async def post(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async with self._session.post(*args, allow_redirects=False, **kwargs) as response:
            if response.status != 200:
                text = await response.text(errors="replace")
                raise failure(response.status, text, response.headers)
            yield response


class CheckedCompletions(LocalCompletionsAPI):
    """Asks a completion server; see :class:`LocalCompletionsAPI` for the arguments."""

    async def get_batched_requests(self, *args: Any, **kwargs: Any) -> Any:
        """Send all requests without lm-eval's own progress bar, which no option turns off."""
        with redirect_stderr(io.StringIO()):
            replies = await super().get_batched_requests(*args, **kwargs)
        for reply in replies:
            if isinstance(reply, EvaluationError):
                raise reply
        return replies

    async def amodel_call(
        self, session: Any, *args: Any, cache_keys: Any = None, **kwargs: Any
    ) -> Any:
        """Send one request; its cache key names the item in errors.

        lm-eval repeats a request that raises, so permanent errors are returned instead.
        """
        checked = _CheckedSession(session)
        try:
            return await super().amodel_call(checked, *args, cache_keys=cache_keys, **kwargs)
        except BadReply as error:
            error.request = cache_keys[0] if cache_keys else None
            return error
        except ServerError as error:
            if error.transient:
                raise
            return error

    def _create_payload(self, messages: Any, *, eos: str | None = None, **kwargs: Any) -> Any:
        # lm-eval leaves the end of text out of the stop sequences of concurrent requests.
        return super()._create_payload(messages, eos=eos or self.eos_string, **kwargs)

    @staticmethod
    def parse_logprobs(
        outputs: Any, tokens: Any = None, ctxlens: Any = None, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return the score of a reply to one prompt."""
        return [score(only_choice(outputs), len(tokens[0]), ctxlens[0])]

    @staticmethod
    def parse_generations(outputs: Any, **_: Any) -> list[str]:
        """Return the text of a reply to one prompt."""
        return [text(only_choice(outputs))]


def failure(status: int, text: str, headers: Mapping[str, str]) -> ServerError:
    """Return the error for a reply with a status other than 200."""
    if 300 <= status < 400 and "Location" in headers:
        return ServerError(
            f"HTTP {status}: it redirects to {headers['Location']}, and redirects are not "
            "followed; give the final address"
        )
    return ServerError(f"HTTP {status}: {text[:500].strip()}", status in _TRANSIENT)


def check_address(url: str) -> str:
    """``url`` without slashes at its end."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise EvaluationError(f"base_url: '{url}' is not an http address") from None
    if parts.username is not None or parts.password is not None:
        raise EvaluationError(
            f"base_url: the address contains a user name or password; give the address of "
            f"{parts.hostname} without it, and the key in OPENAI_API_KEY"
        )
    if not usable:
        raise EvaluationError(f"base_url: '{url}' is not an http address")
    return url.rstrip("/")


def server_models(base_url: str) -> dict[str, str]:
    """Return the models that an OpenAI-compatible server offers: name -> folder, if reported."""
    url = check_address(base_url) + "/models"
    try:
        response = httpx.get(url, timeout=10)
        if response.status_code != 200:
            raise failure(response.status_code, response.text, response.headers)
        reply = parse_json(response.content)
    except (httpx.HTTPError, httpx.InvalidURL, JsonError, ServerError) as error:
        raise EvaluationError(
            f"no server answers at {url} ({error}); start one with 'moe-finetune serve'"
        ) from None
    entries = reply.get("data") if isinstance(reply, dict) else None
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("id"), str) for entry in entries
    ):
        raise EvaluationError(
            f"{url} does not answer like an OpenAI-compatible server ({reply!r:.200})"
        )
    return {entry["id"]: str(entry.get("root") or "") for entry in entries}


def open_server(
    checkpoint: str | Path, base_url: str | None, model: str | None, seed: int
) -> tuple[CheckedCompletions, dict[str, Any], str]:
    """A server's ``model``, its only one unless named; ``checkpoint`` is the tokenizer's folder.

    Returns lm-eval's model, all settings that can change a reply, and a hash of the served model.
    """
    if base_url is None:
        raise EvaluationError(
            "backend 'server' needs base_url, for example http://localhost:8000/v1"
        )
    offered = server_models(base_url)
    if model is None and len(offered) == 1:
        model = next(iter(offered))
    if model not in offered:
        raise EvaluationError(
            f"the server at {base_url} has no model '{model}'{did_you_mean(str(model), offered)}"
        )
    folder = Path(checkpoint)
    has_folder = folder.is_dir()
    max_length = 2048
    if has_folder:
        config = read_config(folder)
        max_length = int(config.get("max_position_embeddings") or max_length)
    # It logs every retried request; the final failure is in our error's message.
    logging.getLogger("lm_eval.models.api_models").setLevel(logging.CRITICAL)
    lm = CheckedCompletions(
        base_url=base_url.rstrip("/") + "/completions",
        model=model,
        tokenizer=str(folder) if has_folder else str(checkpoint),
        tokenizer_backend="huggingface",
        tokenized_requests=True,
        max_length=max_length,
        num_concurrent=8,
        timeout=REQUEST_SECONDS,
        max_retries=TRIES,
        seed=seed,
        trust_remote_code=False,
    )
    content = checkpoint_hash(folder) if has_folder else str(checkpoint)
    served = Path(offered[model])
    if has_folder and (served / "config.json").is_file() and checkpoint_hash(served) != content:
        raise EvaluationError(
            f"the server at {base_url} serves {served} as '{model}', which is not the checkpoint "
            f"{folder}"
        )
    # A server that does not report its folder may serve other weights.
    identity = sha256_json(["server", base_url, model, content])
    return (
        lm,
        {
            "backend": "server",
            "base_url": base_url,
            "model": model,
            "seed": seed,
            "max_length": max_length,
            "versions": package_versions("lm-eval"),
        },
        identity,
    )


def only_choice(reply: Any) -> dict[str, Any]:
    """Return the choice of a reply to one prompt."""
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or not all(isinstance(c, dict) for c in choices):
        raise BadReply("the reply has no list of choices")
    indices = [choice.get("index") for choice in choices]
    if indices != [0] or isinstance(indices[0], bool):
        raise BadReply(f"the reply to one prompt has choices of index {indices}, not [0]")
    return choices[0]


def text(choice: dict[str, Any]) -> str:
    """Return a generation's text."""
    content = choice.get("text")
    if not isinstance(content, str):
        raise BadReply(f"text is {content!r:.40}")
    return content


def score(choice: dict[str, Any], tokens: int, context: int) -> tuple[float, bool]:
    """Sum of log-probabilities (nats) of a continuation, and whether it is greedy.

    ``choice`` echoes the ``tokens`` that were sent, of which the first ``context`` are not the
    continuation, and has one generated token.
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
    for position in range(context, tokens):
        logprob = _log_probability(logprobs["token_logprobs"][position], position)
        best = logprobs["top_logprobs"][position]
        if not isinstance(best, dict) or not best:
            raise BadReply(f"top_logprobs[{position}] is {best!r:.40}")
        highest = max(_log_probability(value, position) for value in best.values())
        if highest < logprob - _ROUNDING:
            raise BadReply(
                f"top_logprobs[{position}] are below the token's own log-probability {logprob}"
            )
        total += logprob
        greedy = greedy and logprob == highest
    return total, greedy


def _log_probability(value: Any, position: int) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadReply(f"log-probability {position} is {value!r:.40}")
    if not -_LOWEST <= value <= _ROUNDING:  # also false for NaN
        raise BadReply(f"log-probability {position} is {value}, not the logarithm of a probability")
    return float(value)
