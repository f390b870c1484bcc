"""``verify --served``: ask a server, compute what it should answer, and judge the difference."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from moe_finetune.errors import EvaluationError
from moe_finetune.io import write_atomic
from moe_finetune.io.counted import counted
from moe_finetune.io.environment import package_versions
from moe_finetune.io.hashes import sha256_json
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.io.terminal import terminal
from moe_finetune.models.tokenizer import Tokenizer
from moe_finetune.served import reference
from moe_finetune.served.client import Answer, Served
from moe_finetune.served.rendering import Rendering, compare_rendering
from moe_finetune.served.verdict import Difference, Floor, Outcome, floor_of, judge, spread

if TYPE_CHECKING:
    from moe_finetune.checkpoint.open import Checkpoint

Values = list[np.ndarray]
RIGHT: tuple[Outcome, ...] = ("the trained model", "the reference")


@dataclass(frozen=True)
class Sources:
    """What a server should answer with.

    Attributes:
        tuned: the merged checkpoint, or the base that ``adapter`` adapts; None with ``server``.
        base: the checkpoint without training; None if it is not known.
        server, base_server: servers of the same models, where they do not fit on this machine.
    """

    tuned: Path | None
    adapter: Path | None = None
    base: Path | None = None
    server: Served | None = None
    base_server: Served | None = None


@dataclass(frozen=True)
class ServedReport:
    """What was asked, how far the answers are, and the verdict.

    Attributes:
        tokens: scored tokens of all ``prompts``; ``ids`` the hash of the prompts.
        floor, moved, tuned, base: f, D, t and b of :mod:`moe_finetune.served.verdict`.
        greedy: share of the tokens that the server generated which the trained model would too;
            None if the server reports no ids.
    """

    url: str
    model: str
    prompts: int
    tokens: int
    ids: str
    floor: Floor
    moved: Difference | None
    tuned: Difference
    base: Difference | None
    greedy: float | None
    rendering: Rendering
    rendered: str
    verdict: Outcome

    def right(self, rounded: bool = False) -> bool:
        """Whether the server answers with the trained model, or with ``rounded`` nearly so."""
        return self.verdict in RIGHT or (rounded and self.verdict == "the trained model, rounded")

    @property
    def factor(self) -> float:
        """How much nearer the answers are to the trained model than to its base."""
        if self.base is None:
            return float("nan")
        return self.base.mean / self.tuned.mean if self.tuned.mean else float("inf")

    def text(self) -> str:
        """The verdict, then what it follows from, a line each."""
        headline = f"{self.url}, model '{self.model}': {self.verdict}"
        if self.verdict == "the trained model, rounded":
            headline += f" ({self.factor:.1f} x nearer to it than to its base)"
        if self.verdict == "cannot tell":
            headline += ": training moves these tokens by no more than two programs differ"
        lines = [
            headline,
            f"  {counted(self.tokens, 'token')} of {counted(self.prompts, 'prompt')}; "
            "differences of log-probabilities in nats, 95 % intervals over prompts",
            f"  served - trained   {self.tuned.text()}",
        ]
        if self.base is not None and self.moved is not None:
            lines.append(f"  served - base      {self.base.text()}")
            lines.append(f"  trained - base     {self.moved.text()}")
        lines.append(f"  two programs       {self.floor.text()}")
        if self.greedy is not None:
            lines.append(f"  greedy tokens      {100 * self.greedy:.0f} % equal")
        lines.append(f"  chat template      {self.rendering}: {self.rendered}")
        return "\n".join(lines)

    def to_mapping(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **asdict(self),
            "versions": package_versions("moe-finetune", "torch", "transformers", "peft"),
        }

    def write(self, run: RunFolder) -> None:
        """Write ``served.json`` in a run's folder, over the last one."""
        write_atomic(run.served, json.dumps(self.to_mapping(), indent=2) + "\n")


@dataclass(frozen=True)
class Measurement:
    """Log-probabilities of the same tokens by the served model and by what it should be.

    Each has one array a prompt, in nats. ``floor`` has absolute differences of two programs for one
    model, which were ``measured`` or else come from rounding alone.
    """

    served: Values
    tuned: Values
    base: Values | None
    floor: Values
    measured: bool

    def of(self, prompts: Sequence[int]) -> Measurement:
        """The same for some of the prompts, which may repeat."""

        def chosen(values: Values) -> Values:
            return [values[prompt] for prompt in prompts]

        base = None if self.base is None else chosen(self.base)
        served, tuned, floor = map(chosen, (self.served, self.tuned, self.floor))
        return Measurement(served, tuned, base, floor, self.measured)

    def judged(self) -> Judgement:
        """The four differences, and the verdict."""
        floor = floor_of(self.floor, self.measured)
        tuned = spread(_apart(self.served, self.tuned))
        if self.base is None:
            return Judgement(floor, None, tuned, None, judge(floor, None, tuned, None))
        moved = spread(_apart(self.tuned, self.base))
        base = spread(_apart(self.served, self.base))
        return Judgement(floor, moved, tuned, base, judge(floor, moved, tuned, base))


@dataclass(frozen=True)
class Judgement:
    """f, D, t and b of :mod:`moe_finetune.served.verdict`, and the verdict that they give."""

    floor: Floor
    moved: Difference | None
    tuned: Difference
    base: Difference | None
    verdict: Outcome


def check_served(
    served: Served,
    sources: Sources,
    prompts: Sequence[list[int]],
    tokenizer: Tokenizer,
    served_base: Served | None = None,
) -> ServedReport:
    """Compare a served model with what was trained.

    Args:
        served_base: the base on the same server, which measures the floor.
        tokenizer: of the trained model's folder.
    """
    same = sources.server
    if same is not None and (same.url, same.model) == (served.url, served.model):
        raise EvaluationError(
            f"--reference: is the server that is checked ({served.url}); give another one, of the "
            "trained model"
        )
    with terminal().phase("ask"):
        answers = ask(served, prompts)
        base_answers = ask(served_base, prompts) if served_base is not None else None
        rendering, rendered = compare_rendering(served, tokenizer)
    with terminal().phase("reference"):
        measurement, greedy = measure(sources, answers, base_answers)
    result = measurement.judged()
    verdict = result.verdict
    if rendering == "another" and verdict in RIGHT:
        verdict = "another chat template"
    return ServedReport(
        url=served.url,
        model=served.model,
        prompts=len(prompts),
        tokens=sum(map(len, measurement.served)),
        ids=sha256_json(list(prompts)),
        floor=result.floor,
        moved=result.moved,
        tuned=result.tuned,
        base=result.base,
        greedy=greedy,
        rendering=rendering,
        rendered=rendered,
        verdict=verdict,
    )


def measure(
    sources: Sources, answers: Sequence[Answer], base_answers: Sequence[Answer] | None = None
) -> tuple[Measurement, float | None]:
    """Score a server's answers by the models of ``sources``, and the share of equal greedy tokens.

    ``base_answers``: the served base's, which measure the floor.
    """
    tuned, greedy, floor = _tuned(sources, answers)
    if base_answers is not None:
        floor = _measured_floor(sources, base_answers)
    served = [answer.logprobs for answer in answers]
    base = _base(sources, answers)
    return Measurement(served, tuned, base, floor, base_answers is not None), greedy


def ask(served: Served, prompts: Sequence[list[int]]) -> list[Answer]:
    """The server's answers to all prompts, one after the other."""
    answers = []
    for done, prompt in enumerate(prompts, 1):
        answers.append(served.answer(prompt))
        terminal().progress(done, len(prompts), f"prompts of {served.model}")
    return answers


def _tuned(sources: Sources, answers: Sequence[Answer]) -> tuple[Values, float | None, Values]:
    """The trained model's log-probabilities, the share of equal greedy tokens, and what rounding
    to the checkpoint's dtype alone changes (nothing where a second server is the reference).
    """
    if sources.server is not None:
        values = [sources.server.score(answer) for answer in answers]
        return values, None, [np.zeros_like(value) for value in values]
    assert sources.tuned is not None
    checkpoint = reference.open_reference(sources.tuned)
    exact = reference.score(checkpoint, answers, sources.adapter)
    values = [scores.logprobs for scores in exact]
    rounded = values
    if (stored := _dtype_of(checkpoint)) != torch.float32:
        in_dtype = reference.score(checkpoint, answers, sources.adapter, stored)
        rounded = [scores.logprobs for scores in in_dtype]
    return values, _equal_share(answers, exact), _apart(values, rounded)


def _dtype_of(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype in which a server runs a checkpoint by default."""
    dtype = checkpoint.model_config.dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16


def _equal_share(answers: Sequence[Answer], scores: Sequence[reference.Scores]) -> float | None:
    equal = []
    for answer, scored in zip(answers, scores, strict=True):
        prompt = answer.first == 1  # the prompt was scored, so one token was generated after it
        if prompt and answer.next_token is None:
            return None
        generated = [answer.next_token] if prompt else answer.ids[answer.first :]
        likeliest = scored.greedy[-1:] if prompt else scored.greedy[:-1]
        equal += [one == other for one, other in zip(generated, likeliest, strict=True)]
    return float(np.mean(equal))


def _base(sources: Sources, answers: Sequence[Answer]) -> Values | None:
    if sources.base_server is not None:
        return [sources.base_server.score(answer) for answer in answers]
    if sources.base is None or sources.server is not None:
        return None
    checkpoint = reference.open_reference(sources.base)
    return [scores.logprobs for scores in reference.score(checkpoint, answers)]


def _measured_floor(sources: Sources, answers: Sequence[Answer]) -> Values:
    """How far the served base is from the base."""
    values = _base(sources, answers)
    if values is None:
        raise EvaluationError(
            "--base-model: the base itself is not known, so the served one cannot measure what two "
            "programs differ by; give it with --base, or its server with --reference-base"
        )
    return _apart([answer.logprobs for answer in answers], values)


def _apart(one: Values, other: Values) -> Values:
    """Absolute differences, prompt by prompt."""
    return [np.abs(a - b) for a, b in zip(one, other, strict=True)]
