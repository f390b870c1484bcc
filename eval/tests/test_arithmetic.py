"""Problems state true sums and differences, and held-out facts stay out of training."""

import random
import re

import pytest

from eval.demo.arithmetic import (
    BASE_DIFFERENCES,
    BASE_SUMS,
    HELD_OUT_SHARE,
    TASK_DIFFERENCES,
    TASK_SUMS,
    base_problem,
    equation,
    is_held_out,
    task_problem,
)


def numbers(text: str) -> tuple[int, int]:
    first, second = map(int, re.findall(r"\d+", text))
    return first, second


def fact(first: int, second: int, answer: int) -> tuple[int, int]:
    """The addends behind a problem, whether it asks for their sum or for one of them."""
    if first + second == answer:
        return first, second
    assert first - second == answer
    return second, answer


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("draw", [base_problem, task_problem])
def test_answers_are_right_and_facts_belong_to_their_side(held_out, draw):
    rng = random.Random(7)
    kinds = set()
    for _ in range(400):
        problem = draw(rng, held_out)
        first, second = numbers(problem.question)
        addends = fact(first, second, problem.answer)
        assert is_held_out(*addends) == held_out
        assert 0 < problem.answer <= 99 and max(first, second) <= 99
        kinds.add(first + second == problem.answer)
    assert kinds == {True, False}


def test_equations_are_right_and_never_held_out():
    rng = random.Random(8)
    for _ in range(400):
        problem = equation(rng, small_share=0.3)
        left, sign, right, equals = problem.question.split()
        assert equals == "="
        expected = int(left) + int(right) if sign == "+" else int(left) - int(right)
        assert problem.answer == expected
        assert not is_held_out(*fact(int(left), int(right), problem.answer))


def test_a_fact_is_held_out_in_either_order():
    pairs = [(a, b) for a in range(1, 99) for b in range(1, 99 - a)]
    assert all(is_held_out(a, b) == is_held_out(b, a) for a, b in pairs)
    share = sum(is_held_out(a, b) for a, b in pairs) / len(pairs)
    assert share == pytest.approx(HELD_OUT_SHARE, abs=0.02)


def test_wordings_are_apart():
    assert not set(BASE_SUMS + BASE_DIFFERENCES) & set(TASK_SUMS + TASK_DIFFERENCES)
