"""The draw of mutants: reproducible, valid Python, one expression each."""

import ast
import shutil
import subprocess

import pytest

from tests import mutants
from tests.mutants import ROOT, draw, folders_of, mutants_of

SOURCE = '''"""One of each."""
def f(a: int = 1, b=2.5):
    if not a <= b and b is not None:
        return a + b * 3
    return (a if b else 4) // 2
'''


def test_every_kind_of_change(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    file = tmp_path / "moe_finetune" / "losses" / "f.py"
    file.parent.mkdir(parents=True)
    file.write_text(SOURCE)
    found = {(m.was, m.text) for m in mutants_of(file)}
    assert {
        ("a <= b", "(a < b)"),
        ("not a <= b", "(a <= b)"),
        ("b is not None", "(b is None)"),
        ("not a <= b and b is not None", "(not a <= b or b is not None)"),
        ("a + b * 3", "(a - b * 3)"),
        ("b * 3", "(b / 3)"),
        ("a if b else 4", "(4 if b else a)"),
        ("2.5", "(3.5)"),
    } <= found
    for mutant in mutants_of(file):
        assert mutant.room == "losses"
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "moe_finetune", copy / "moe_finetune")
        mutant.apply(copy)
        text = (copy / "moe_finetune" / "losses" / "f.py").read_text()
        assert text != SOURCE and ast.parse(text)
        assert sum(a != b for a, b in zip(text.splitlines(), SOURCE.splitlines(), strict=True)) == 1
        shutil.rmtree(copy)


@pytest.mark.parametrize("room", [None, "metrics"])
def test_a_draw_repeats_and_has_tests(room):
    drawn = draw(5, 12, room)
    assert drawn == draw(5, 12, room) != draw(6, 12, room) and len(drawn) == 12
    for mutant in drawn:
        assert room in (None, mutant.room)
        assert all((ROOT / folder).exists() for folder in folders_of(mutant))


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A package of two rooms, whose tests reach ``losses/f.py`` over one import, two, and none."""
    files = {
        "moe_finetune/losses/f.py": "def f(a):\n    return a + 1\n",
        "moe_finetune/losses/g.py": "from moe_finetune.losses.f import f\n",
        "moe_finetune/losses/h.py": "",
        "tests/losses/test_a_far.py": "def test():\n    pass\n",
        "tests/losses/test_b_middle.py": "from moe_finetune.losses import g\ndef test(): g.f\n",
        "tests/losses/test_c_near.py": "from moe_finetune.losses.f import f\ndef test(): f(1)\n",
        "tests/losses/runs/test_d_deep.py": "import moe_finetune.losses.g\ndef test(): pass\n",
        "tests/models/test_patches.py": "def test():\n    'moe_finetune.losses.f.f'\n",
        "tests/models/test_other.py": "import moe_finetune.losses.h\ndef test():\n    pass\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "runs" / "of_a_user").mkdir(parents=True)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    return tmp_path


def test_tests_that_name_the_module_come_first(repository):
    (first, *_) = mutants_of(repository / "moe_finetune/losses/f.py")
    near, rest = mutants.ordered_tests(first)
    assert near == ["tests/losses/test_c_near.py", "tests/models/test_patches.py"]
    middle = ["tests/losses/runs/test_d_deep.py", "tests/losses/test_b_middle.py"]
    assert rest == [*middle, "tests/losses/test_a_far.py"]


def test_the_first_failure_is_named(repository):
    assert mutants.first_failure(repository, ["tests/losses/test_a_far.py"], 120) is None
    broken = repository / "tests/losses/test_a_far.py"
    broken.write_text("def test_fine():\n    pass\ndef test():\n    assert False\n")
    files = ["tests/losses/test_b_middle.py", "tests/losses/test_a_far.py"]
    failed = mutants.first_failure(repository, files, 120)
    assert failed == "tests/losses/test_a_far.py::test"
    broken.write_text("import nothing_of_this_name\n")
    assert mutants.first_failure(repository, files, 120) == "tests/losses/test_a_far.py"
    with pytest.raises(RuntimeError, match=r"not found: .*test_gone\.py"):
        mutants.first_failure(repository, ["tests/losses/test_gone.py"], 120)


@pytest.mark.parametrize(
    ("near", "rest", "result"),
    [
        (None, None, "**survived**"),
        ("tests/a.py::test", None, "killed by tests/a.py::test"),
        (None, "tests/b.py::test", "killed by tests/b.py::test"),
        ("too long", None, "not decided"),
        (None, "too long", "**survived** 2 near files; the room's others took too long"),
    ],
)
def test_verdicts_of_near_tests_and_of_the_rooms(repository, monkeypatch, near, rest, result):
    (first, *_) = mutants_of(repository / "moe_finetune/losses/f.py")
    answers, given = iter((near, rest)), []

    def answer(copy, files, seconds):
        assert "a - 1" in (copy / "moe_finetune/losses/f.py").read_text() and seconds <= 60
        given.extend(files)
        assert all((copy / file).is_file() for file in files)
        assert not (copy / "runs").exists()
        text = next(answers)
        if text == "too long":
            raise subprocess.TimeoutExpired("pytest", seconds)
        return text

    monkeypatch.setattr(mutants, "first_failure", answer)
    assert mutants.verdict(first, 60) == result
    assert given == [
        path for part in mutants.ordered_tests(first)[: 1 if near else 2] for path in part
    ]
