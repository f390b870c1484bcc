"""Names say what they name: at most one binding in two hundred is a filler."""

import ast
from collections import Counter
from pathlib import Path

import moe_finetune

WORDS = (
    "own held found given said kept came theirs asked told each some here there left rest whole "
    "below above apart alone made took taken wanted before after shown known place number work "
    "every again"
)
FILLERS = frozenset(WORDS.split())
"""Words that fit any value; a name in the field's terms says more."""
MOST = 0.005


def bindings(path: Path) -> list[str]:
    """The names of parameters and of what is assigned, loops and comprehensions included."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.arg):
            names.append(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
    return names


def test_names_are_not_fillers():
    package = Path(moe_finetune.__file__).parent
    places: Counter[str] = Counter()
    total = 0
    for path in package.rglob("*.py"):
        names = bindings(path)
        total += len(names)
        fillers = sum(name in FILLERS for name in names)
        if fillers:
            places[str(path.relative_to(package))] = fillers
    assert places.total() <= MOST * total, (
        f"{places.total()} of {total} bindings are fillers, most of them in "
        f"{', '.join(f'{path} ({count})' for path, count in places.most_common(8))}"
    )


def test_fillers_are_found(tmp_path):
    source = "def f(own, x):\n    for place in x:\n        found = [each for each in place]\n"
    (tmp_path / "a.py").write_text(source)
    names = bindings(tmp_path / "a.py")
    assert sorted(names) == ["each", "found", "own", "place", "x"]
    assert sum(name in FILLERS for name in names) == 4
