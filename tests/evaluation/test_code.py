"""Programs of HumanEval and MBPP: right ones pass, no others do; scoring is its own step."""

import dataclasses
import itertools
import json
import os

import pytest

from moe_finetune.errors import DataError, EvaluationError
from moe_finetune.evaluation.programs import human_eval_program, mbpp_program, score_code
from moe_finetune.evaluation.sandbox.names import required_names
from moe_finetune.io.row_files import read_rows
from tests.evaluation.forgers import FORGERS, WIRE


def _forged(sandbox, problems, items, forgers):
    """Return which of ``forgers`` passed which of ``items``."""
    owners, programs = [], []
    for name, code in forgers.items():
        for item in items:
            honest = human_eval_program(problems[item], "    pass\n")
            entry = problems[item]["entry_point"]
            programs.append(dataclasses.replace(honest, code=code.replace("ENTRY", entry)))
            owners.append((name, item))
    verdicts = sandbox.run_all(programs, 4)
    return [owner for owner, v in zip(owners, verdicts, strict=True) if v.passed]


# Items whose tests use abs, range, set, tuple, math, poly and other names beside the entry point.
USING_NAMES = (4, 32, 33, 37, 38, 50)


def test_no_program_without_answers_passes(sandbox, problems):
    assert _forged(sandbox, problems, USING_NAMES[:1], FORGERS) == []
    first = dict(itertools.islice(WIRE.items(), 4))
    assert _forged(sandbox, problems, USING_NAMES[1:], first) == []
    # The control: answers do pass.
    right = [human_eval_program(problems[i], problems[i]["canonical_solution"])
             for i in USING_NAMES]  # fmt: skip
    assert [v.reason for v in sandbox.run_all(right, 2)] == [""] * len(right)


@pytest.mark.parametrize(
    ("tests", "setup", "reference", "names"),
    [
        ("assert set(f(x)) == {1}", "", "", ("f", "x")),
        ("assert sum(10, 15) == 6", "", "def sum(a, b): return 6", ("sum",)),
        ("import re\nassert math.isclose(g(2), sum([1]))", "import math", "", ("g",)),
        ("assert math.isclose(g(2), 1)", "", "import math\ndef g(x): pass", ("g",)),
        ("root = Node(1)\nassert height(root) == 1", "", "", ("Node", "height")),
        ("def check(c):\n    y = 1\n    assert c(y) == [h(i) for i in z]\ncheck(f)", "", "",
         ("f", "h", "z")),
    ],
)  # fmt: skip
def test_wanted_names_are_read_from_the_tests(tests, setup, reference, names):
    assert required_names(tests, setup, reference) == names


def test_mbpp_set_up_uses_the_programs_classes(sandbox):
    doc = {
        "code": "class Node: ...\ndef height(node): ...",
        "test_setup_code": "root = Node(1)\nroot.left = Node(2)",
        "test_list": ["assert height(root) == 2", "assert math.fabs(height(None)) == 0"],
    }
    reply = (
        "class Node:\n    def __init__(self, x): self.x, self.left = x, None\n"
        "def height(node): return 0 if node is None else 1 + height(node.left)\n[DONE]"
    )
    program = mbpp_program(doc, reply)
    assert program.entry == ("Node", "height")
    assert sandbox.run(program).passed
    assert not sandbox.run(mbpp_program(doc, reply.replace("1 +", "2 +"))).passed
    with pytest.raises(DataError, match=r"import \* from math"):
        mbpp_program({**doc, "test_imports": ["from math import *"]}, reply)


@pytest.mark.slow
def test_human_eval_solutions_pass_and_empty_bodies_do_not(sandbox, problems):
    right = [human_eval_program(p, p["canonical_solution"]) for p in problems]
    empty = [human_eval_program(p, "    pass\n") for p in problems]
    assert len(problems) == 164
    assert [v.reason for v in sandbox.run_all(right, 2) if not v.passed] == []
    assert [v for v in sandbox.run_all(empty, 2) if v.passed] == []


def _sample(problem, completion):
    return {
        "task": "humaneval_local", "doc_id": 0, "item": "x", "filter": "none", "doc": problem,
        "replies": [[completion]], "metrics": {},
    }  # fmt: skip


def test_scoring_is_a_step_of_its_own(sandbox, problems, tmp_path):
    rows = [_sample(p, p["canonical_solution"]) for p in problems[:2]]
    rows += [_sample(problems[2], "    return 0\n")]
    file = tmp_path / "samples.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    score = score_code(file, "humaneval", sandbox=sandbox)
    scored = read_rows(tmp_path / "samples.scored.jsonl")
    assert [r["verdicts"][0]["reason"] for r in scored] == ["", "", "AssertionError"]
    assert [r["metrics"]["pass@1"] for r in scored] == [1.0, 1.0, 0.0]
    assert (score["passed"], score["n"], score["pass@1"]) == (2, 3, 2 / 3)
    with pytest.raises(EvaluationError, match="unknown form 'humanevil'; did you mean 'humaneval'"):
        score_code(file, "humanevil", sandbox=sandbox)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"replies": []}, "replies have no text"),
        ({"replies": [[]]}, "replies have no text"),
        ({"replies": [[None]]}, "replies have no text"),
        ({"doc": {}}, "the item has no 'test_list'"),
        ({"doc": {"test_list": [1]}}, "not an item of form 'mbpp'"),
        ({"doc": {"test_list": ["assert ("]}}, "tests that are not Python"),
        ({"doc": {"test_list": ["assert f()"], "code": "def ("}}, "reference solution"),
    ],
)
def test_samples_that_are_no_programs_are_named(tmp_path, change, said):
    row = _sample({"test_list": ["assert f()"]}, "def f(): return 1") | change
    file = tmp_path / "samples.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=f"samples.jsonl, row 1: .*{said}"):
        score_code(file, "mbpp")
    assert os.listdir(tmp_path) == ["samples.jsonl"]
