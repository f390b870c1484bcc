"""Changes of the package that no test sees: a draw of small mutants, each against its tests.

    python -m tests.mutants --seed 7 --count 60             # a table, one line a mutant
    python -m tests.mutants --seed 7 --count 5 --room losses --seconds 120

A mutant changes one expression of one file: a comparison, an arithmetic or a boolean operator, a
number, a condition, a returned value. It runs in a copy of the repository: first the files of tests
that import or name its module, wherever they are, then the others of its room, those that reach the
module over the fewest imports first. *Survived* means that the tests that were run passed: look at
the line, since some mutants change nothing (an assert's message, a value that is overwritten), and
write the test that is missing.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "moe_finetune"
FOLDERS = {"cli": "verbs", "models": "models", "demo": "demo", "vllm": "vllm"}
"""Rooms whose tests are in a folder of another name, or that need one named."""
ALSO = {"models": ["families"], "checkpoint": ["quantization"], "moe": ["families"]}
SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One changed expression: ``text`` takes the place of ``was`` at a line and columns."""

    path: Path
    line: int
    start: int
    end: int
    was: str
    text: str

    @property
    def room(self) -> str:
        """The folder of the package, or the file's own name at the top."""
        parts = self.path.relative_to(ROOT / PACKAGE).parts
        return parts[0].removesuffix(".py")

    def apply(self, copy: Path) -> None:
        """Write the change into a copy of the repository."""
        file = copy / self.path.relative_to(ROOT)
        lines = file.read_bytes().splitlines(keepends=True)
        line = lines[self.line - 1]
        lines[self.line - 1] = line[: self.start] + self.text.encode() + line[self.end :]
        file.write_bytes(b"".join(lines))


def changed(node: ast.AST) -> ast.AST | None:
    """Another expression for ``node``; None where there is no small change."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        return ast.Compare(node.left, [SWAPS[type(node.ops[0])]()], node.comparators)
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        return ast.BinOp(node.left, SWAPS[type(node.op)](), node.right)
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(SWAPS[type(node.op)](), node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return ast.Constant(node.value + 1)
    if isinstance(node, ast.IfExp):
        return ast.IfExp(node.test, node.orelse, node.body)
    return None


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every mutant of a file whose expression is on one line and no annotation."""
    source = path.read_text(encoding="utf-8")
    lines = source.encode().splitlines()
    tree = ast.parse(source)
    typed = [n for n in ast.walk(tree) if isinstance(n, ast.arg | ast.AnnAssign | ast.FunctionDef)]
    annotations = [getattr(n, "annotation", None) or getattr(n, "returns", None) for n in typed]
    skipped = {id(inner) for a in annotations if a is not None for inner in ast.walk(a)}
    for node in ast.walk(tree):
        new = None if id(node) in skipped else changed(node)
        if new is None or node.lineno != node.end_lineno:
            continue
        text = ast.unparse(ast.fix_missing_locations(new))
        was = lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()
        yield Mutant(path, node.lineno, node.col_offset, node.end_col_offset, was, f"({text})")


@cache
def all_mutants(path: Path) -> tuple[Mutant, ...]:
    """Every mutant of a file, read once."""
    return tuple(mutants_of(path))


def draw(seed: int, count: int, room: str | None = None) -> list[Mutant]:
    """A draw over all mutants of the package, or of one room; the same for the same seed."""
    folder = ROOT / PACKAGE / (room or "")
    files = sorted(folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")])
    found = [m for path in files for m in all_mutants(path) if room in (None, m.room)]
    return random.Random(seed).sample(found, min(count, len(found)))


def folders_of(mutant: Mutant) -> list[str]:
    """The folders of tests that a room's changes are run against."""
    names = [FOLDERS.get(mutant.room, mutant.room), *ALSO.get(mutant.room, [])]
    folders = [f"tests/{name}" for name in names if (ROOT / "tests" / name).is_dir()]
    return folders or ["tests/test_run.py", "tests/recipe"]


# -- which tests first ----------------------------------------------------------------------------


def module_name(path: Path) -> str:
    """The dotted name of a file of the package or of the tests."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def named_modules(path: Path) -> set[str]:
    """What a file imports anywhere, or names in a text, such as a place to patch."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for dotted in re.findall(rf"\b(?:{PACKAGE}|tests)(?:\.\w+)+", node.value):
                parts = dotted.split(".")
                names |= {".".join(parts[:n]) for n in range(2, len(parts) + 1)}
    return names


def imports_to(module: str) -> dict[str, int]:
    """Over how many imports each module of the package and the tests reaches ``module``."""
    paths = [path for top in (PACKAGE, "tests") for path in (ROOT / top).rglob("*.py")]
    importers: dict[str, set[str]] = {}
    for path in paths:
        for name in named_modules(path):
            importers.setdefault(name, set()).add(module_name(path))
    steps, waiting = {module: 0}, deque([module])
    while waiting:
        name = waiting.popleft()
        for importer in importers.get(name, set()) - steps.keys():
            steps[importer] = steps[name] + 1
            waiting.append(importer)
    return steps


def ordered_tests(mutant: Mutant) -> tuple[list[str], list[str]]:
    """The files of tests that import or name the mutant's module, and the others of its room.

    Both in the order of running: the room's own before those of others, then those that reach the
    module over fewer imports, then short files.
    """
    steps = imports_to(module_name(mutant.path))
    room = [ROOT / folder for folder in folders_of(mutant)]

    def is_in_room(path: Path) -> bool:
        return any(path == part or part in path.parents for part in room)

    def rank(path: Path) -> tuple[bool, float, int]:
        far = steps.get(module_name(path), float("inf"))
        return not is_in_room(path), far, path.stat().st_size

    files = sorted((ROOT / "tests").rglob("test_*.py"), key=rank)
    near = [path for path in files if steps.get(module_name(path)) == 1]
    rest = [path for path in files if is_in_room(path) and path not in near]
    names = [[str(path.relative_to(ROOT)) for path in some] for some in (near, rest)]
    return names[0], names[1]


# -- running --------------------------------------------------------------------------------------


def verdict(mutant: Mutant, seconds: float) -> str:
    """*killed* by a named test, *survived*, or what was run when the time was over."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "copy"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=_not_copied)
        mutant.apply(copy)
        ends = time.monotonic() + seconds
        near, rest = ordered_tests(mutant)
        for files in filter(None, (near, rest)):
            try:
                problem = first_failure(copy, files, ends - time.monotonic())
            except subprocess.TimeoutExpired:
                if files is near:
                    return "not decided"
                return f"**survived** {len(near)} near files; the room's others took too long"
            if problem is not None:
                return f"killed by {problem}"
    return "**survived**"


def _not_copied(folder: str, names: list[str]) -> list[str]:
    """What lies beside the package and is none of it."""
    at_top = {".git", ".venv", "build", "runs"} if Path(folder) == ROOT else set()
    return [name for name in names if name in at_top]


def first_failure(copy: Path, files: list[str], seconds: float) -> str | None:
    """Run the files of tests in ``copy``, in order, up to the first test that fails: its name."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-rfE"]
    command += ["--tb=no", "-m", "not gpu and not vllm and not slow", *files]
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=copy, env=environment, timeout=seconds,
                          capture_output=True, text=True)  # fmt: skip
    if done.returncode in (0, 5):  # 5: all of them are marked and were left out
        return None
    if done.returncode in (3, 4):  # pytest's own errors, which no mutant is killed by
        raise RuntimeError(done.stderr or done.stdout)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split()[1] if failed else "an error of the collection"


def main() -> None:
    """Draw, run, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--room", help="only this folder of the package")
    parser.add_argument("--seconds", type=float, default=300.0, help="for each mutant")
    options = parser.parse_args()
    print("| place | was | becomes | result |\n| --- | --- | --- | --- |")
    for mutant in draw(options.seed, options.count, options.room):
        place = f"{mutant.path.relative_to(ROOT / PACKAGE)}:{mutant.line}"
        cells = (place, f"`{mutant.was}`", f"`{mutant.text}`")
        shown = " | ".join(cell.replace("|", "\\|") for cell in cells)
        print(f"| {shown} | {verdict(mutant, options.seconds)} |", flush=True)


if __name__ == "__main__":
    main()
