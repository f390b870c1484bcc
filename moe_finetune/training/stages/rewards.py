"""Rewards for reinforcement learning: functions of a completion and the fields of its row.

``rewards: [exact_match]``, or ``rewards: [{name: boxed, weight: 2.0}]``. TRL calls a reward with a
batch of completions and, by name, a list for each field of their rows. It returns one number per
completion, or None where it does not apply. A plugin adds one by ``REWARDS.register(name,
function)``.
"""

import functools
import inspect
import logging
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from moe_finetune.checkpoint.tokenizer_files import reply_ends
from moe_finetune.data.preference_and_prompt_forms import READ_BY
from moe_finetune.errors import DataError, DependencyError, RecipeError, did_you_mean
from moe_finetune.io.row_files import short
from moe_finetune.models.tokenizer import Tokenizer
from moe_finetune.recipe.sections import RewardSection
from moe_finetune.registry import Registry

Reward = Callable[..., list[float]]
log = logging.getLogger(__name__)
SLOW = 60.0
"""Seconds after which a reward is named that is still at work."""
LARGEST_REWARD = 1e12
"""Largest weighted reward: its square must fit into float32."""
REWARDS: Registry[Reward] = Registry(
    "reward",
    RecipeError,
    lambda name, value: None if callable(value) else f"is {value!r:.80}; it must be a function",
)


def text_of(completion: Any) -> str:
    """The text of a completion; for a chat, the text of its last turn."""
    if isinstance(completion, str):
        return completion
    return str(completion[-1]["content"]) if completion else ""


def answer_of(completion: Any) -> str:
    """The text of a completion after the model's thoughts; empty if it has no answer."""
    from moe_finetune.evaluation.judged_reply import judged

    return judged(text_of(completion)) or ""


def exact_match(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 for a completion whose final number is that of ``answer``, else 0.

    As GSM8K is scored. An answer without a number is compared as text.
    """
    from moe_finetune.evaluation.final_answers import (
        final_number,
        math_answer,
        names_differ,
        strict_number,
    )

    scores = []
    for completion, expected in zip(completions, answer, strict=True):
        text, right = answer_of(completion).strip(), str(expected).strip()
        final = strict_number(right) or final_number(right)
        same = text == right if final is None else final_number(text) == final
        same = same and not names_differ(math_answer(text) or "", right)
        scores.append(float(same))
    return scores


def boxed(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    r"""1 for a completion whose ``\boxed{}`` is mathematically equal to ``answer``, else 0."""
    from moe_finetune.evaluation.final_answers import boxed as in_the_box
    from moe_finetune.evaluation.math_equivalence import same_answer

    return [
        float(same_answer(in_the_box(answer_of(c)), in_the_box(str(a)) or str(a)))
        for c, a in zip(completions, answer, strict=True)
    ]


def code_tests(completions: Sequence[Any], tests: Sequence[Any], **_: Any) -> list[float]:
    """1 for a completion whose program passes its row's ``tests`` in a sandbox, else 0."""
    from moe_finetune.evaluation.programs import mbpp_program
    from moe_finetune.evaluation.sandbox import Sandbox

    programs = [
        mbpp_program({"test_list": [t] if isinstance(t, str) else list(t)}, answer_of(c))
        for c, t in zip(completions, tests, strict=True)
    ]
    return [float(verdict.passed) for verdict in Sandbox().run_all(programs)]


REWARDS.register("exact_match", exact_match)
REWARDS.register("boxed", boxed)
REWARDS.register("code", code_tests)


def _after_thoughts(
    function: Reward, tokenizer: Tokenizer, variables: dict[str, Any], ends: Sequence[int]
) -> Reward:
    """``function`` of the answers that follow the thoughts, read from prompts and tokens.

    A completion whose last token is not one of ``ends``, or padding, was cut.

    TRL decodes completions without special tokens, which are what ends the thoughts of some models,
    and a prompt may open thoughts that were cut before they closed.
    """
    from moe_finetune.evaluation.judged_reply import judged

    @functools.wraps(function)
    def reward(completions: Sequence[Any], **fields: Any) -> list[float]:
        answers = list(completions)
        pairs: Iterable[tuple[Any, Any]] = ()
        if "prompts" in fields and "completion_ids" in fields:
            pairs = zip(fields["prompts"], fields["completion_ids"], strict=True)
        for i, (prompt, ids) in enumerate(pairs):
            tokens = [int(token) for token in ids]
            if not isinstance(prompt, str):
                prompt = tokenizer.apply_chat_template(
                    prompt, tokenize=False, add_generation_prompt=True, **variables
                )
            cut = not tokens or tokens[-1] not in (*ends, tokenizer.pad_token_id)
            text = tokenizer.decode(tokens if cut else tokens[:-1])
            answer = judged(text, prompt, cut)
            if answer != text:  # otherwise as TRL decoded it
                answers[i] = answer or ""
                for special in tokenizer.all_special_tokens:
                    answers[i] = answers[i].replace(special, "")
        return function(completions=answers, **fields)

    return reward


def reward_functions(
    sections: Sequence[RewardSection],
    columns: Sequence[str],
    tokenizer: Tokenizer | None = None,
    variables: dict[str, Any] | None = None,
    generation_ends: int | list[int] | None = None,
) -> list[Reward]:
    """The functions of a recipe's ``rewards:`` over rows with these ``columns``.

    ``tokenizer`` finds the end of a completion's thoughts; ``variables`` are the chat template's,
    ``generation_ends`` the ``eos_token_id`` of the model's generation config.
    """
    ends = [] if tokenizer is None else reply_ends(tokenizer, generation_ends)
    functions = []
    for index, name in enumerate(section.name for section in sections):
        try:
            function = REWARDS[name]
        except RecipeError as error:
            raise RecipeError(f"rewards.{index}.name: {error}") from None
        needed = READ_BY.get(name)
        if needed is None:
            function = _checked(function, f"rewards: '{name}'")
        elif needed not in columns:
            raise DataError(
                f"rewards: '{name}' reads the field '{needed}' of each row, but the rows "
                f"have {', '.join(columns)}{did_you_mean(needed, columns)}; map your fields with "
                f"data.columns: {{{needed}: ...}}"
            )
        _check_dependencies(name)
        if needed is not None and tokenizer is not None:
            function = _after_thoughts(function, tokenizer, variables or {}, ends)
        functions.append(function)
    return functions


def _check_dependencies(name: str) -> None:
    if name == "boxed":
        from moe_finetune.evaluation.math_equivalence import require

        require()
    elif name == "code":
        from moe_finetune.evaluation.sandbox import Sandbox

        try:
            Sandbox()
        except DependencyError as error:
            raise DependencyError(f"rewards: 'code' runs programs in a sandbox: {error}") from error


def _checked(function: Any, where: str) -> Any:
    """Wrap ``function``, asynchronous or not, so that its errors name it."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 (an object's own, which may be a coroutine)
    ):

        @functools.wraps(function)
        async def reward(completions: Sequence[Any], **fields: Any) -> list[float | None]:
            with _faults_said(where):
                scores = await function(completions=completions, **fields)
            return _scores(scores, completions, where)

    else:

        @functools.wraps(function)
        def reward(completions: Sequence[Any], **fields: Any) -> list[float | None]:
            with _faults_said(where):
                scores = function(completions=completions, **fields)
            return _scores(scores, completions, where)

    return reward


@contextmanager
def _faults_said(where: str) -> Iterator[None]:
    waiting = threading.Timer(SLOW, log.warning, (f"{where} has run for {SLOW:.0f} s",))
    waiting.daemon = True
    waiting.start()
    try:
        yield
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise RecipeError(
            f"{where} failed: {type(error).__name__}: {error} ({last.filename}:{last.lineno})"
        ) from error
    finally:
        waiting.cancel()


def _scores(answer: Any, completions: Sequence[Any], where: str) -> list[float | None]:
    """Check what a function returned: one number or None per completion."""
    if not hasattr(answer, "__len__") or isinstance(answer, str | dict):
        raise RecipeError(f"{where} returned {short(answer)}; it must return a list of numbers")
    if len(answer) != len(completions):
        raise RecipeError(
            f"{where} returned {len(answer)} numbers for {len(completions)} completions; it must "
            "return one for each"
        )
    for score, completion in zip(answer, completions, strict=True):
        if score is None or (hasattr(score, "__float__") and abs(float(score)) <= LARGEST_REWARD):
            continue
        raise RecipeError(
            f"{where} returned {short(score)} for the completion {short(text_of(completion))}; "
            f"it must be a number from -{LARGEST_REWARD:g} to {LARGEST_REWARD:g}, or None where "
            "it does not apply"
        )
    return [None if score is None else float(score) for score in answer]
