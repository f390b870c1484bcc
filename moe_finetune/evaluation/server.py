"""A running server behind lm-eval's client; every reply is validated before it is scored."""

import io
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from lm_eval.models.openai_completions import LocalCompletionsAPI

from moe_finetune.errors import EvaluationError, did_you_mean
from moe_finetune.io.checkpoint_files import read_config
from moe_finetune.io.environment import package_versions
from moe_finetune.io.hashes import checkpoint_hash, sha256_json
from moe_finetune.vllm.openai_server import (
    ROUNDING,
    BadReply,
    ServerError,
    failure,
    log_probability,
    only_choice,
    server_models,
)

REQUEST_SECONDS, TRIES = 300, 4


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
        logprob = log_probability(logprobs["token_logprobs"][position], position)
        best = logprobs["top_logprobs"][position]
        if not isinstance(best, dict) or not best:
            raise BadReply(f"top_logprobs[{position}] is {best!r:.40}")
        highest = max(log_probability(value, position) for value in best.values())
        if highest < logprob - ROUNDING:
            raise BadReply(
                f"top_logprobs[{position}] are below the token's own log-probability {logprob}"
            )
        total += logprob
        greedy = greedy and logprob == highest
    return total, greedy
