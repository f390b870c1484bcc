from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_finetune.errors import DependencyError, EvaluationError
from moe_finetune.evaluation.code import human_eval_program, score_code
from moe_finetune.evaluation.files import read_rows
from moe_finetune.evaluation.sandbox import Limits, Program, Sandbox
from tests.evaluation.hostile import PROGRAMS

QUICK = Limits(seconds=4)
# Passes only for a program that answers 'right', which none of the hostile ones may.
TESTS = "assert f('question') == 'right'\nassert f('other') == 'right'\n"


@pytest.fixture(scope="module")
def sandbox():
    try:
        opened = Sandbox(QUICK, kinds=("bubblewrap",))
    except DependencyError as error:
        pytest.skip(str(error))
    with opened:
        yield opened


@pytest.fixture(scope="module")
def problems(data_folder):
    return read_rows(data_folder / "HumanEval.jsonl.gz")


def _descendants() -> set[int]:
    found, parents = set(), {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if stat[0] != "Z":
                parents[int(entry.name)] = int(stat[1])
    frontier = {os.getpid()}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier}
        found |= frontier
    return found


def test_a_right_program_passes_and_a_wrong_one_says_why(sandbox):
    tests = "assert f(3) == [3, (4.5, None), {'k': {1, 2}}, 1 + 2j, b'z']"
    right = "def f(x):\n    return [x, (4.5, None), {'k': {1, 2}}, 1 + 2j, b'z']"
    assert sandbox.run(Program(right, tests, entry=("f",))).passed
    verdict = sandbox.run(Program("def g(x):\n    return 1", tests, entry=("f",)))
    assert not verdict.passed and "does not define f" in verdict.reason
    verdict = sandbox.run(Program("def f(x):\n    return 1/0", tests, entry=("f",)))
    assert "ZeroDivisionError" in verdict.reason
    assert "SyntaxError" in sandbox.run(Program("def f(:", tests, entry=("f",))).reason


def test_tests_can_use_objects_of_the_program(sandbox):
    code = """
class Node:
    def __init__(self, value): self.value, self.left = value, None
def depth(node): return 0 if node is None else 1 + depth(node.left)
def count():
    yield from (1, 2, 3)
def adder(n): return lambda x: x + n
"""
    tests = """
root = Node(1)
root.left = Node(2)
assert depth(root) == 2 and root.left.value == 2
assert list(count()) == [1, 2, 3]
assert adder(2)(5) == 7
assert [depth(x) for x in (root, None)] == [2, 0]
"""
    verdict = sandbox.run(Program(code, tests))
    assert verdict.passed, verdict.reason
    # The control: the same tests against a program that counts wrongly.
    assert not sandbox.run(Program(code.replace("1 + depth", "2 + depth"), tests)).passed


def test_exceptions_of_the_program_reach_the_tests(sandbox):
    tests = (
        "try:\n    f()\n    raise AssertionError\nexcept ValueError as error:\n"
        "    assert 'odd' in str(error)\n"
    )
    assert sandbox.run(Program("def f():\n    raise ValueError('odd')", tests)).passed
    assert not sandbox.run(Program("def f():\n    raise KeyError('odd')", tests)).passed


@pytest.mark.faults
def test_hostile_programs_never_pass_and_leave_nothing(sandbox, tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    os.chmod(tmp_path, 0o777)
    listener = socket.create_server(("127.0.0.1", 0))
    before = _descendants()
    outside = {p: set(os.listdir(p)) for p in ("/", "/usr", str(Path(sys.base_prefix)))}
    passed = []
    for name, code in PROGRAMS.items():
        code = code.replace("{host}", str(tmp_path))
        code = code.replace("{port}", str(listener.getsockname()[1]))
        if sandbox.run(Program(code, TESTS, entry=("f",))).passed:
            passed.append(name)
    assert passed == []
    assert len(PROGRAMS) >= 20
    listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        listener.accept()
    listener.close()
    assert sorted(os.listdir(tmp_path)) == ["secret.txt"]
    assert (tmp_path / "secret.txt").read_text() == "secret"
    assert {p: set(os.listdir(p)) for p in outside} == outside
    assert not Path("/tmp/left.txt").exists()
    sandbox.close()  # the kept checker is ours; everything else must be gone already
    deadline = time.monotonic() + 5
    while (left := _descendants() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == set()
    # The control: the tests can be passed.
    assert sandbox.run(Program("def f(x): return 'right'", TESTS, entry=("f",))).passed


def test_memory_and_processes_are_limited(sandbox):
    code = """
def grab(n):
    try:
        return len(bytearray(n))
    except MemoryError:
        return -1
def forks():
    import os, signal
    children = []
    try:
        for _ in range(40):
            pid = os.fork()
            if pid == 0:
                signal.pause()
            children.append(pid)
    except OSError:
        pass
    for pid in children:
        os.kill(pid, 9)
    return len(children)
def home():
    import os
    return os.listdir(os.environ['HOME']), os.getuid() != 0
"""
    tests = """
assert grab(100 << 20) == 100 << 20
assert grab(2 << 30) == -1
assert 0 < forks() < 8
assert home() == ([], True)
"""
    verdict = sandbox.run(Program(code, tests))
    assert verdict.passed, verdict.reason


def test_no_sandbox_is_a_refusal_that_names_the_remedies():
    with pytest.raises(DependencyError, match=r"bubblewrap.*--allow-unsafe-local"):
        Sandbox(kinds=())


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ("echo no daemon here >&2; exit 1", "docker: the probe failed .no daemon here."),
        ('[ "$1" = info ] || { echo no image $3 >&2; exit 1; }', "no image mine:1"),
    ],
)
def test_a_container_engine_says_what_is_wrong_with_it(tmp_path, monkeypatch, answers, said):
    engine = tmp_path / "docker"
    engine.write_text(f"#!/bin/sh\n{answers}\n")
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("MOE_FINETUNE_SANDBOX_IMAGE", "mine:1")
    with pytest.raises(DependencyError, match=said) as refusal:
        Sandbox(kinds=("docker", "podman"))
    assert "podman: not installed" in str(refusal.value)
    assert "with the image mine:1" in str(refusal.value)


def test_unsafe_local_runs_only_when_asked_for(capsys):
    with Sandbox(QUICK, allow_unsafe_local=True, kinds=()) as local:
        assert "WITHOUT a sandbox" in capsys.readouterr().err
        assert local.kind == "unsafe-local"
        assert local.run(Program("def f(x): return 'right'", TESTS, entry=("f",))).passed
        assert not local.run(Program("import os\nos._exit(0)", TESTS, entry=("f",))).passed


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


def test_runner_needs_only_the_standard_library():
    folder = Path(shutil.__file__).parent
    code = "import sys; sys.path.insert(0, sys.argv[1]); import runner; print(runner.__file__)"
    from moe_finetune.evaluation.sandbox import policy

    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(policy.RUNNER)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert folder != policy.RUNNER
