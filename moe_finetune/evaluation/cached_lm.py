"""An lm-eval model that stores every reply, counts tokens and never truncates silently."""

import re
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from moe_finetune.data.chat import TemplateLimitError, limited
from moe_finetune.errors import EvaluationError
from moe_finetune.evaluation.backends import Backend
from moe_finetune.evaluation.judged_reply import judged, opens_thoughts
from moe_finetune.evaluation.lm_eval_tasks import REPLY_LENGTHS
from moe_finetune.evaluation.reply_cache import ReplyStore, answer_all
from moe_finetune.evaluation.suites import SuiteTask
from moe_finetune.io.terminal import terminal

Overflow = Literal["error", "truncate"]
_SPECIAL = re.compile(r"<\S+>")


@dataclass
class Usage:
    """A task's cost, and whether its prompts fitted the context.

    ``tokens`` and ``seconds`` are of the requests that were sent, not of ``stored`` ones;
    ``thoughts`` counts replies whose thoughts were removed, ``unanswered`` those that were cut
    inside them.
    """

    requests: int = 0
    stored: int = 0
    tokens: int = 0
    seconds: float = 0.0
    overflowing: int = 0
    longest: int = 0
    policy: str = "error"
    thoughts: int = 0
    unanswered: int = 0

    def as_dict(self) -> dict[str, Any]:
        speed = self.tokens / self.seconds if self.seconds else None
        return asdict(self) | {"tokens_per_second": speed}


class CachedLM(LM):
    """Wraps a backend's lm-eval model.

    ``overflow`` "error" stops a task whose prompts do not fit into the context; "truncate" lets lm-
    eval cut them on the left, and counts them.
    """

    def __init__(
        self,
        backend: Backend,
        store: ReplyStore,
        overflow: Overflow = "error",
        entry: SuiteTask | None = None,
        progress: bool = True,
    ):
        super().__init__()
        self._inner, self._backend, self._store = backend.lm, backend, store
        self._entry, self._progress = entry or SuiteTask(task="task", metric="metric"), progress
        self.usage = Usage(policy=overflow)

    def loglikelihood(self, requests: list[Instance], **_: Any) -> list[tuple[float, bool]]:
        """See lm-eval; replies are (sum of log-probabilities in nats, is greedy)."""
        if self._entry.chat and any(opens_thoughts(request.args[0]) for request in requests):
            raise EvaluationError(
                f"{self._entry.label}: the chat template opens thoughts, inside which the choices "
                "would be measured; set enable_thinking: false on the suite's line if the template "
                "reads it, or chat: false"
            )
        return [(float(r[0]), bool(r[1])) for r in self._answer("loglikelihood", requests)]

    def loglikelihood_rolling(self, requests: list[Instance], **_: Any) -> list[float]:
        """See lm-eval; windows are rolled, so no text is too long."""
        return self._answer("loglikelihood_rolling", requests)

    def generate_until(self, requests: list[Instance], **_: Any) -> list[str]:
        """See lm-eval; of a chat's reply, what is judged, see :mod:`.thoughts`."""
        stops: list[list[str]] = []
        for request in requests:
            context, arguments = request.args
            until = arguments.get("until") or []
            stops.append([until] if isinstance(until, str) else list(until))
            changed = dict(arguments)
            if self._entry.max_tokens is not None:
                changed["max_gen_toks"] = self._entry.max_tokens
            if self._entry.chat:  # other stops may occur in thoughts, or in a program
                changed["until"] = [stop for stop in stops[-1] if _SPECIAL.fullmatch(stop)]
            request.arguments = (context, changed)
        replies = self._answer("generate_until", requests)
        if not self._entry.chat:
            return replies
        lengths = [len(ids) for ids in self._encode(replies)]
        return [
            self._judged(reply, request, length, until)
            for reply, request, length, until in zip(replies, requests, lengths, stops, strict=True)
        ]

    def _judged(self, reply: str, request: Instance, length: int, stops: list[str]) -> str:
        prompt, arguments = request.args
        # Encoding a text again may merge a token or two.
        answer = judged(reply, prompt, cut=length + 2 >= self._reply_tokens(arguments))
        self.usage.thoughts += answer not in (None, reply)
        self.usage.unanswered += answer is None
        answer = answer or ""
        for stop in stops if self._entry.code is None else []:
            answer = answer.split(stop, 1)[0]
        return answer

    def _answer(self, kind: str, requests: list[Instance]) -> list[Any]:
        lengths = self._lengths(kind, requests)
        self.usage.requests += len(requests)
        done = 0

        def ask(indices: list[int]) -> list[Any]:
            started = time.perf_counter()
            chunk = [requests[i] for i in indices]
            replies = self._call(kind, chunk)
            self.usage.seconds += time.perf_counter() - started
            self.usage.tokens += sum(lengths[i] for i in indices)
            if kind == "generate_until":
                self.usage.tokens += sum(map(len, self._encode(list(replies))))
            return replies

        def progress(indices: list[int], stored: bool) -> None:
            nonlocal done
            done, usage = done + len(indices), self.usage
            usage.stored += len(indices) * stored
            if self._progress:
                speed = f", {usage.tokens / usage.seconds:,.0f} tokens/s" if usage.seconds else ""
                note = f"{kind.replace('_', ' ')} {done}/{len(requests)}{speed}"
                terminal().progress(done, len(requests), note)

        return answer_all(
            kind, [r.args for r in requests], ask, self._store, self._backend.chunk, progress
        )

    def _call(self, kind: str, chunk: list[Instance]) -> list[Any]:
        try:
            replies = getattr(self._inner, kind)(chunk, disable_tqdm=True)
            if kind == "generate_until":
                # transformers ends a reply truncated inside a character with U+FFFD, vLLM does not.
                replies = [reply.rstrip("\ufffd") for reply in replies]
            return replies
        except Exception as error:
            if self._backend.kind != "server":
                raise
            address = self._backend.settings["base_url"]
            from moe_finetune.evaluation.server import BadReply

            if isinstance(error, BadReply):
                raise EvaluationError(
                    f"{_name(chunk, error.request)}: the server at {address} gave a reply that "
                    f"cannot be scored: {error}; earlier replies are kept"
                ) from error
            # The client library raises whatever its transport raised, after its own retries.
            raise EvaluationError(
                f"the server at {address} stopped answering "
                f"({type(error).__name__}: {error}); its earlier replies are stored; repeat the "
                "command to continue"
            ) from error

    def _encode(self, texts: list[str]) -> list[list[int]]:
        tokenizer = getattr(self._inner, "tokenizer", None)
        if not callable(tokenizer) or not texts:
            return [[] for _ in texts]
        return tokenizer(texts, add_special_tokens=False).input_ids

    def _added(self, text: str) -> int:
        """The number of special tokens that lm-eval writes around a prompt: none where it begins
        with one, as a chat does, and none before a server, which gets ids.
        """
        tokenizer = getattr(self._inner, "tokenizer", None)
        beginning = getattr(tokenizer, "bos_token", None)
        if not callable(tokenizer) or self._backend.kind == "server":
            return 0
        if beginning and text.startswith(beginning):
            return 0
        return int(tokenizer.num_special_tokens_to_add(pair=False))

    def _lengths(self, kind: str, requests: list[Instance]) -> list[int]:
        """Return prompt tokens per request, after checking that they fit."""
        texts = ["".join(r.args) if kind == "loglikelihood" else r.args[0] for r in requests]
        lengths = [count + self._added(text) for count, text in zip(
            map(len, self._encode(texts)), texts, strict=True)]  # fmt: skip
        limit = self._backend.max_length
        if limit is None or kind == "loglikelihood_rolling":
            return lengths
        # A generation needs room for its reply, a log-likelihood for the token vLLM must generate.
        room = [self._reply_tokens(r.args[1]) if kind == "generate_until" else 1 for r in requests]
        if max(room, default=0) >= limit:
            raise EvaluationError(
                f"{requests[0].task_name}: a reply of {max(room)} tokens does not fit into the "
                f"context of {limit}; set a smaller max_tokens on the suite's line, or a longer "
                "context (vllm.max_model_len)"
            )
        needs = [length + extra for length, extra in zip(lengths, room, strict=True)]
        too_long = [need for need in needs if need > limit]
        self.usage.overflowing += len(too_long)
        self.usage.longest = max(self.usage.longest, *needs) if needs else 0
        if too_long:
            message = (
                f"{requests[0].task_name}: {len(too_long)} of {len(requests)} prompts do not fit "
                f"into the context of {limit} tokens (the longest needs {max(too_long)} with its "
                "reply)"
            )
            if self.usage.policy == "error":
                raise EvaluationError(
                    f"{message}; use fewer shots, a smaller max_tokens, a longer context "
                    "(vllm.max_model_len), or overflow 'truncate' to truncate them on the left and "
                    "count them"
                )
            terminal().say(f"{message}; they are truncated on the left", "warning")
        return [min(n, limit - extra) for n, extra in zip(lengths, room, strict=True)]

    def _reply_tokens(self, arguments: dict[str, Any]) -> int:
        for key in REPLY_LENGTHS:
            if arguments.get(key) is not None:
                return int(arguments[key])
        return int(getattr(self._inner, "max_gen_toks", 256))

    def apply_chat_template(self, chat_history: list, add_generation_prompt: bool = True) -> str:
        try:
            with limited():
                if self._entry.enable_thinking is None:
                    return self._inner.apply_chat_template(chat_history, add_generation_prompt)
                return self._inner.tokenizer.apply_chat_template(
                    chat_history,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                    enable_thinking=self._entry.enable_thinking,
                )
        except TemplateLimitError as error:
            raise EvaluationError(str(error)) from error

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._inner.chat_template(chat_template)

    @property
    def tokenizer_name(self) -> str:
        """Name under which lm-eval caches rendered prompts."""
        return self._inner.tokenizer_name


def _name(chunk: list[Instance], arguments: tuple[Any, ...] | None) -> str:
    """Name the task and, if possible, the item of the request with these arguments."""
    task = chunk[0].task_name
    for request in chunk:
        if arguments is not None and list(request.args) == list(arguments):
            return f"{task}, item {request.doc_id}"
    return f"{task}, one of items {min(r.doc_id for r in chunk)}-{max(r.doc_id for r in chunk)}"
