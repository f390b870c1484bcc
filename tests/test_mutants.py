"""The draw of mutants: reproducible, valid Python, one expression each."""

import ast
import shutil

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
