"""Arithmetic word problems: sums and differences within 0..99, worded by templates.

A problem states a *fact*, two addends and their sum (``7 + 35 = 42``), as a sum or as one of its
two differences. Held-out facts appear in no training text in any of these forms, so a right
answer on them cannot be recalled. Answers are spelt digit by digit.
"""

import hashlib
import random
from dataclasses import dataclass

LARGEST = 99
HELD_OUT_SHARE = 0.08

NAMES = (
    "Ada", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo", "Ida", "Jonas", "Kira",
    "Leo", "Mia", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tara", "Victor",
)  # fmt: skip
THINGS = (
    "apples", "books", "cards", "coins", "cups", "eggs", "flowers", "keys", "lamps", "marbles",
    "nuts", "oranges", "pears", "pencils", "pins", "plates", "ropes", "shells", "stamps", "stones",
)  # fmt: skip

# Wordings of the pretraining text; {a}, {b} are the operands in the order of the calculation.
BASE_SUMS = (
    "{n} has {a} {t} and buys {b} more. How many {t} does {n} have now?",
    "{n} has {a} {t}. {m} has {b} {t}. How many {t} do they have together?",
    "There are {a} {t} in a box and {b} {t} in a bag. How many {t} are there in all?",
    "{n} found {a} {t} on Monday and {b} on Friday. How many {t} did {n} find?",
    "A shop has {a} {t} and gets {b} more. How many {t} are in the shop now?",
    "What is {a} plus {b}?",
)
BASE_DIFFERENCES = (
    "{n} has {a} {t} and gives {b} to {m}. How many {t} does {n} have now?",
    "{n} had {a} {t} and lost {b} of them. How many {t} are left?",
    "There are {a} {t} in a box. {n} takes {b} out. How many {t} are left in the box?",
    "A shop has {a} {t} and sells {b}. How many {t} are in the shop now?",
    "{n} has {a} {t}. {m} has {b} fewer. How many {t} does {m} have?",
    "What is {a} minus {b}?",
)
# Wordings of the fine-tuning data and the held-out task.
TASK_SUMS = (
    "{n} picks {a} {t} in the morning and {b} {t} in the evening. How many {t} is that in total?",
    "On the table lie {a} {t}. {n} puts {b} more {t} on it. How many {t} lie on the table now?",
    "{n} saved {a} {t}, and {m} gave {n} another {b}. How many {t} does {n} own?",
    "One shelf holds {a} {t} and another holds {b}. How many {t} do both shelves hold?",
)
TASK_DIFFERENCES = (
    "{n} carries {a} {t} and drops {b} on the way. How many {t} reach home?",
    "Out of {a} {t}, {b} are broken. How many {t} are whole?",
    "{n} packed {a} {t} and sold {b} at the market. How many {t} remain?",
    "{n} needs {a} {t} and already owns {b}. How many more {t} does {n} need?",
)


@dataclass(frozen=True)
class Problem:
    """A question in words and its answer, a number in 0..99."""

    question: str
    answer: int

    @property
    def prompt(self) -> str:
        """The prompt; the answer follows after one space."""
        return f"Question: {self.question}\nAnswer:"


def is_held_out(a: int, b: int) -> bool:
    """Whether the fact ``a + b``, in either order, is kept out of all training text."""
    digest = hashlib.sha256(f"{min(a, b)}+{max(a, b)}".encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def draw_addends(rng: random.Random, held_out: bool, small_share: float = 0.0) -> tuple[int, int]:
    """Two addends with a sum of at most 99; ``small_share`` of the pairs stay below 10 each."""
    while True:
        top = 9 if rng.random() < small_share else LARGEST
        a, b = rng.randint(1, top), rng.randint(1, top)
        if a + b <= LARGEST and is_held_out(a, b) == held_out:
            return a, b


def base_problem(rng: random.Random, held_out: bool, small_share: float = 0.0) -> Problem:
    """A problem in the wordings of the pretraining text."""
    return _word_problem(rng, held_out, BASE_SUMS, BASE_DIFFERENCES, small_share)


def task_problem(rng: random.Random, held_out: bool) -> Problem:
    """A problem in the wordings of the fine-tuning data and the held-out task."""
    return _word_problem(rng, held_out, TASK_SUMS, TASK_DIFFERENCES)


def _word_problem(
    rng: random.Random,
    held_out: bool,
    sums: tuple[str, ...],
    differences: tuple[str, ...],
    small_share: float = 0.0,
) -> Problem:
    """A sum or a difference with equal chance, in one of the given wordings."""
    a, b = draw_addends(rng, held_out, small_share)
    name, other = rng.sample(NAMES, 2)
    words = {"n": name, "m": other, "t": rng.choice(THINGS)}
    if rng.random() < 0.5:
        return Problem(rng.choice(sums).format(a=a, b=b, **words), a + b)
    return Problem(rng.choice(differences).format(a=a + b, b=b, **words), a)


def equation(rng: random.Random, small_share: float) -> Problem:
    """A bare calculation of a training fact, ``12 + 30 =`` or ``42 - 30 =``, and its answer."""
    a, b = draw_addends(rng, held_out=False, small_share=small_share)
    if rng.random() < 0.5:
        return Problem(f"{a} + {b} =", a + b)
    return Problem(f"{a + b} - {b} =", a)
