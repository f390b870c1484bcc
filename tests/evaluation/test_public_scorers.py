"""Rewards beside the scorers that the benchmarks publish, as lm-eval has them.

Each class of replies that they score otherwise is listed with its reason, and no other may differ.
IFEval has no scorer here: its task is lm-eval's own.
"""

import importlib.metadata
import importlib.util
import random
import subprocess
import sys
from itertools import product
from pathlib import Path

import lm_eval
import math_verify
import pytest
import yaml
from lm_eval.api.metrics import exact_match_hf_evaluate
from lm_eval.filters import build_filter_ensemble

from moe_finetune.evaluation.final_answers import strict_number
from moe_finetune.evaluation.programs import human_eval_program, mbpp_program
from moe_finetune.training.stages.rewards import boxed, exact_match

TASKS = Path(lm_eval.__file__).parent / "tasks"


def their_module(name):
    """lm-eval's functions of a task."""
    spec = importlib.util.spec_from_file_location(f"their_{name}", TASKS / name / "utils.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# GSM8K

GSM8K = yaml.safe_load((TASKS / "gsm8k" / "gsm8k.yaml").read_text())
STRICT, FLEXIBLE = "strict-match", "flexible-extract"
NUMBERS = {
    "plain": "{n}",
    "thousands": "{n:,}",
    "unit": "{n} km",
    "dollars": "${n:,}",
    "euros": "€{n}",
    "escaped dollars": r"\${n}",
    "bold": "**{n}**",
    "percent": "{n}%",
    "negative": "-{n}",
    "decimals": "{n}.00",
    "minus sign": "\u2212{n}",
    "fraction": "{double}/2",
}
PLACES = {
    "mark": "We add 3 and 4.\n#### {x}",
    "mark and words": "We add.\n#### {x} in all",
    "sentence": "So 3 are left. The answer is {x}.",
    "without a period": "The answer is {x}",
    "last number": "Of 3 and 4 we get {x}.",
    "equation": "The answer is 5 + 6 = {x}.",
    "colon": "3 of 4.\nAnswer: {x}",
    "mark, then a question": "We add.\n#### {x}\nQuestion: What is 3 + 4?",
    "two marks": "#### {x}\n#### 3",
    "sentence that goes on": "The answer is {x}, of 4 boxes.",
    "answer first": "Answer: {x}\nThis is because of 3 + 4.",
    "box": r"Thus $\boxed{{{x}}}$.",
    "box and words": r"Thus $\boxed{{{x}}}$ in 3 days.",
}
# Why lm-eval finds no right answer in them where the reward does.
AS_TEXT = {
    "decimals": "numbers are compared as texts",
    "minus sign": "a minus is a hyphen only",
    "fraction": "a fraction's last number is its answer",
}
NOT_FLEXIBLE = {
    "mark, then a question": "the last number of the reply is its answer",
    "two marks": "the last number of the reply is its answer",
    "sentence that goes on": "the last number of the reply is its answer",
    "answer first": "the last number of the reply is its answer",
    "box": "the $. after it counts as a number",
    "box and words": "the last number of the reply is its answer",
}
NOT_STRICT = {
    "dollars": "the number must follow the mark",
    "euros": "the number must follow the mark",
    "escaped dollars": "the number must follow the mark",
    "bold": "the number must follow the mark",
}
MARKED = ("mark", "mark and words", "mark, then a question", "two marks")


class Instance:
    """What a filter of lm-eval reads and writes."""

    def __init__(self, reply):
        self.resps, self.doc, self.filtered_resps = [reply], {}, {}


def gsm8k(reply, target, name):
    """The score by lm-eval's filter and metric of the task."""
    (steps,) = (entry["filter"] for entry in GSM8K["filter_list"] if entry["name"] == name)
    parts = [(step["function"], {k: v for k, v in step.items() if k != "function"})
             for step in steps]  # fmt: skip
    instance = Instance(reply)
    build_filter_ensemble(name, parts).apply([instance])
    (metric,) = GSM8K["metric_list"]
    options = {k: metric[k] for k in ("ignore_case", "ignore_punctuation", "regexes_to_ignore")}
    answers = [instance.filtered_resps[name]]
    return exact_match_hf_evaluate(predictions=answers, references=[target], **options)[
        "exact_match"
    ]


def test_final_numbers_beside_gsm8k_s():
    draw = random.Random(20261128)
    count, differing = 0, set()
    for (place, text), (form, number) in product(PLACES.items(), NUMBERS.items()):
        for digits in (1, 3, 4):
            n = draw.randrange(5 * 10 ** (digits - 1), 10**digits)  # no number of the texts
            right = -n if form in ("negative", "minus sign") else n
            reply = text.format(x=number.format(n=n, double=2 * n))
            for target in (right, right + draw.choice([20, 100])):
                told = f"Add.\n#### {target:,}"
                case, true = (place, form, reply, target), target == right
                flexible, strict = (gsm8k(reply, told, name) for name in (FLEXIBLE, STRICT))
                assert exact_match([reply], [told]) == [true], case
                as_number = form not in AS_TEXT
                assert flexible == (true and as_number and place not in NOT_FLEXIBLE), case
                found = place in MARKED and as_number and form not in NOT_STRICT
                assert strict == (true and found), case
                if place in MARKED:
                    assert (strict_number(reply) == target) is true, case
                count += 1
                differing |= {place, form} if true and not flexible else set()
    assert count == 936 and differing >= NOT_FLEXIBLE.keys() | AS_TEXT.keys()


def test_a_last_number_that_is_no_answer():
    """lm-eval takes it; the reward does not."""
    target = "Add.\n#### 56"
    for reply in ("The answer is 9, and not 56.", "#### 9\nOr is it 56?", r"\boxed{9} of 56"):
        assert gsm8k(reply, target, FLEXIBLE) == 1 and exact_match([reply], [target]) == [0]


# MATH

# Reference: answers that are the same, and answers that are not.
MATH = {
    "12": (
        ["12", "12.", "12.0", r"12\text{ cm}", r"12^\circ", r"\$12", "x=12", r"12\%", "24/2"],
        ["13", "-12", "1.2", "1,2", r"\frac{12}{5}"],
    ),
    r"\frac{3}{4}": (
        [r"\frac34", r"\dfrac{3}{4}", r"\tfrac{3}{4}", "3/4", "0.75", r"\frac{6}{8}"],
        [r"\frac{4}{3}", "0.7", "3", r"-\frac{3}{4}"],
    ),
    r"2\sqrt{3}": (
        [r"2\sqrt3", r"\sqrt{12}", r"2 \sqrt{3}", r"2\cdot\sqrt{3}"],
        [r"3\sqrt{2}", r"2\sqrt{5}", r"\sqrt{2}"],
    ),
    "10,000": (["10000", "10,000", r"10{,}000", r"10,\!000", r"\$10,000"], ["1000", "10"]),
    r"(2,\infty)": (
        [r"(2, \infty)", r"\left(2,\infty\right)"],
        [r"[2,\infty)", r"(3,\infty)", "2"],
    ),
    "(1,-2)": (["(1, -2)", r"\left(1,-2\right)"], ["(-2,1)", "(1,2)"]),
    r"\text{Monday}": (["Monday", r"\text{Monday}", r"\mbox{Monday}"], ["Tuesday", "Mon"]),
    "x^2+2x+1": (["(x+1)^2", "x^2 + 2x + 1", "1+2x+x^2"], ["x^2+x+1", "x^2-2x+1"]),
    r"\pi": ([r"\pi", r"1\pi"], ["3.14", r"2\pi"]),
    "1,2": (["1,2", "2,1", "1, 2"], ["1", "12", "1,3"]),
    ".5": (["0.5", ".5", r"\frac12"], ["5", "0.05"]),
    "y=2x+3": (["y=2x+3", "2x+3", "y = 2x + 3"], ["y=3x+2", "2x"]),
    "1010_2": (["1010_2", "1010_{2}", "1010"], ["1010_3", "10"]),
}
REPLIES = (
    r"We get $\boxed{{{x}}}$.",
    r"First \boxed{{7}}, and in the end $$\boxed{{{x}}}$$",
    r"So it is \fbox{{{x}}}",
)
# By scorer, pairs of reference and answer that it decides otherwise than the reward.
ALGEBRA = {  # Hendrycks' and Minerva's compare texts
    ("12", "12.0"), ("12", "24/2"), (r"\frac{3}{4}", r"\frac{6}{8}"), (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"2\sqrt{3}", r"2\cdot\sqrt{3}"), ("x^2+2x+1", "(x+1)^2"), ("x^2+2x+1", "1+2x+x^2"),
    (r"\pi", r"1\pi"), ("1,2", "2,1"), ("1010_2", "1010_{2}"), ("1010_2", "1010"), ("12", "12."),
    (r"\frac{3}{4}", "0.75"),
}  # fmt: skip
TEXT_OR_NUMBER = {  # Hendrycks' keeps commas and \text
    ("10,000", "10000"), ("10,000", "10{,}000"), (r"\text{Monday}", "Monday"),
    (r"\text{Monday}", r"\mbox{Monday}"),
}  # fmt: skip
LAYOUT = {  # Minerva's keeps \dfrac, \left, \%, and does not write 3/4 as a fraction
    ("12", r"12\%"), (r"\frac{3}{4}", r"\dfrac{3}{4}"), (r"\frac{3}{4}", r"\tfrac{3}{4}"),
    (r"\frac{3}{4}", "3/4"), (r"(2,\infty)", r"\left(2,\infty\right)"),
    ("(1,-2)", r"\left(1,-2\right)"), (".5", "0.5"), (".5", r"\frac12"),
}  # fmt: skip
BASE = {("12", "12."), ("1010_2", "1010_3")}  # math-verify drops a base, and keeps a period
DIFFERENT = {
    "hendrycks_math": ALGEBRA | TEXT_OR_NUMBER,
    "minerva_math": ALGEBRA | LAYOUT,
    "math_verify": BASE,
}


@pytest.fixture(scope="module")
def their_math():
    """By name: whether a solution's last box is the reference's."""
    hendrycks = their_module("hendrycks_math")
    with pytest.MonkeyPatch.context() as patched:  # of ANTLR it wants 4.11, for its own algebra
        version = importlib.metadata.version
        patched.setattr(
            importlib.metadata, "version",
            lambda name: "4.11" if name.startswith("antlr4") else version(name),
        )  # fmt: skip
        minerva = their_module("minerva_math")

    def box(text):
        found = hendrycks.last_boxed_only_string(text)
        if found is None or found.startswith(r"\fbox"):
            return None if found is None else found.removeprefix(r"\fbox{").removesuffix("}")
        return hendrycks.remove_boxed(found)

    def normalized(text):
        return minerva.normalize_final_answer(box(text))

    return {
        "hendrycks_math": lambda text, told: hendrycks.is_equiv(box(text), box(told)),
        "minerva_math": lambda text, told: normalized(text) == normalized(told),
        "math_verify": lambda text, told: math_verify.verify(
            math_verify.parse(told), math_verify.parse(rf"$\boxed{{{box(text)}}}$")
        ),
    }


@pytest.mark.slow
def test_boxes_beside_math_s(their_math):
    different = {name: set() for name in their_math}
    count = 0
    for target, (right, wrong) in MATH.items():
        told = rf"So it is $\boxed{{{target}}}$."
        for answer, text in product([*right, *wrong], REPLIES):
            reply = text.format(x=answer)
            (reward,) = boxed([reply], [told])
            assert reward == (answer in right), (target, answer)
            count += 1
            for name, score in their_math.items():
                if bool(score(reply, told)) != bool(reward):
                    different[name].add((target, answer))
    assert different == DIFFERENT and count > 200


# HumanEval and MBPP

PROMPT = 'def largest(values):\n    """The largest of the values."""\n'
HUMAN_EVAL = {
    "prompt": PROMPT,
    "entry_point": "largest",
    "test": "def check(candidate):\n    assert candidate([3, 9, 4]) == 9\n",
}
MBPP = {"test_list": ["assert largest([3, 9, 4]) == 9", "assert largest([-2, -7]) == -2"]}
BODIES = {
    "    return max(values)\n": True,
    "    best = values[0]\n    for value in values:\n        if value > best:\n"
    "            best = value\n    return best\n": True,
    "    return values[-1]\n": False,
    "    return max(values\n": False,
    "    raise SystemExit(0)\n": False,
}
# What follows the prompt's opened block, and what is a reply of its own.
CONTINUED = {
    "body": "{body}",
    "closed block": "{body}```",
    "closed block and words": "{body}```\nThis returns it:\n```python\nlargest([1])\n```",
    "more functions": "{body}\ndef other():\n    return 3\n",
}
WHOLE = {
    "block": "```python\n{function}```",
    "words around a block": "Here it is.\n```python\n{function}```\nIt is largest.",
    "block without a language": "```\n{function}```",
    "two blocks": "```python\n{function}```\nIt prints 9:\n```python\nprint(largest([9]))\n```",
}


@pytest.fixture(scope="module")
def their_programs():
    """lm-eval's functions that make programs of replies; running them needs a download."""
    with pytest.MonkeyPatch.context() as patched:
        import evaluate

        class Never:
            def compute(self, **_):
                return None

        patched.setattr(evaluate, "load", lambda name: Never())
        return their_module("humaneval"), their_module("mbpp")


def passes(program):
    """Run as the benchmarks run it: an error is a failure, and so is an end before its end."""
    process = subprocess.run(
        [sys.executable, "-I", "-c", f"{program}\nprint('to the end')"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return process.returncode == 0 and process.stdout.endswith("to the end\n")


@pytest.mark.slow
def test_programs_beside_human_eval_s(sandbox, their_programs):
    human_eval, _ = their_programs
    cases = [(form, text.format(body=body), right) for form, text in CONTINUED.items()
             for body, right in BODIES.items()]  # fmt: skip
    verdicts = sandbox.run_all([human_eval_program(HUMAN_EVAL, reply) for _, reply, _ in cases], 2)
    for (form, reply, right), verdict in zip(cases, verdicts, strict=True):
        ((program,),) = human_eval.build_predictions_instruct([[reply]], [HUMAN_EVAL])
        theirs = passes(f"{program}\n{HUMAN_EVAL['test']}\ncheck(largest)")
        assert verdict.passed is theirs is right, (form, reply)


@pytest.mark.slow
def test_programs_beside_mbpp_s(sandbox, their_programs):
    _, mbpp = their_programs
    cases = [(form, text.format(function=PROMPT + body), right) for form, text in WHOLE.items()
             for body, right in BODIES.items()]  # fmt: skip
    verdicts = sandbox.run_all([mbpp_program(MBPP, reply) for _, reply, _ in cases], 2)
    for (form, reply, right), verdict in zip(cases, verdicts, strict=True):
        # Their prompt has opened a block, which the reply continues.
        ((program,),) = mbpp.build_predictions([[reply.partition("```")[2]]], [MBPP])
        theirs = passes("\n".join([program, *MBPP["test_list"]]))
        assert verdict.passed is theirs is right, (form, reply)
