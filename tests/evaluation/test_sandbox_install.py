"""With and without a sandbox: what doctor and the check say."""

import json
import os

import pytest

from moe_finetune.cli import doctor
from moe_finetune.evaluation.sandbox.install import remedy, sandbox_state
from moe_finetune.evaluation.suites import Suite
from moe_finetune.evaluation.what_can_run import check_suite, render_checks

TASK = {"task": "humaneval_local", "label": "code", "shots": 0, "metric": "pass@1",
        "filter": "sandbox", "code": "humaneval", "files": {"test": "rows.jsonl"}}  # fmt: skip


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A machine whose only programs are those that a test writes here, as the root user's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return folder


def program(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def checked(tmp_path, **options):
    row = {"task_id": "T/0", "prompt": "def f(x):\n", "canonical_solution": "    return x\n",
           "entry_point": "f", "test": "def check(c):\n    assert c(3) == 3\n"}  # fmt: skip
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (found,) = check_suite(Suite(name="s", tasks=[TASK], folder=tmp_path), **options)
    return found


def test_without_a_sandbox_doctor_and_check_say_so(bare, tmp_path):
    assert sandbox_state()[0] is None
    program(bare, "apt-get", "exit 0")
    line = doctor._sandbox()
    assert (line.state, line.remedy) == ("note", remedy())
    assert remedy() == "apt-get install -y bubblewrap libseccomp2"
    found = checked(tmp_path)
    assert not found.runnable and remedy() in found.problem
    assert "cannot run  no sandbox to score programs in: apt-get" in render_checks([found])
    assert checked(tmp_path, allow_unsafe_local=True).runnable


def test_with_a_sandbox_they_say_so(tmp_path):
    kind, trouble = sandbox_state()
    if kind is None:
        pytest.skip(trouble)
    assert doctor._sandbox() == doctor.Check("sandbox", "ok", kind)
    found = checked(tmp_path)
    assert found.runnable and "ready" in render_checks([found])


def test_a_sandbox_that_does_not_start_is_a_note(bare):
    program(bare, "bwrap", "exit 1")
    line = doctor._sandbox()
    assert line.state == "note" and "bubblewrap" in line.found


def test_another_user_needs_sudo(bare, monkeypatch):
    program(bare, "apt-get", "exit 0")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert remedy() == "sudo apt-get install -y bubblewrap libseccomp2"
