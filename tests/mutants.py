"""Changes of the package that no test sees: a draw of small mutants, each against its tests.

    python -m tests.mutants --seed 7 --count 60             # a table, one line a mutant
    python -m tests.mutants --seed 7 --count 5 --room losses --seconds 120

A mutant changes one expression of one file: a comparison, an arithmetic or a boolean operator, a
number, a condition, a returned value. It runs in a copy of the repository. *Survived* means that
the tests that were run passed: look at the line, since some mutants change nothing (an assert's
message, a value that is overwritten), and write the test that is missing.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
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


def draw(seed: int, count: int, room: str | None = None) -> list[Mutant]:
    """A draw over all mutants of the package, or of one room; the same for the same seed."""
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    found = [m for path in files for m in mutants_of(path) if room in (None, m.room)]
    return random.Random(seed).sample(found, min(count, len(found)))


def folders_of(mutant: Mutant) -> list[str]:
    """The folders of tests that a room's changes are run against."""
    names = [FOLDERS.get(mutant.room, mutant.room), *ALSO.get(mutant.room, [])]
    folders = [f"tests/{name}" for name in names if (ROOT / "tests" / name).is_dir()]
    return folders or ["tests/test_run.py", "tests/recipe"]


def verdict(mutant: Mutant, seconds: float) -> str:
    """*killed* by a named test, *survived*, or *not decided* in time."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "copy"
        skipped = shutil.ignore_patterns(".git", ".venv", "build", "runs", "__pycache__")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=skipped)
        mutant.apply(copy)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-rf"]
        command += ["--tb=no", "-m", "not gpu and not vllm and not slow", *folders_of(mutant)]
        environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(command, cwd=copy, env=environment, timeout=seconds,
                                  capture_output=True, text=True)  # fmt: skip
        except subprocess.TimeoutExpired:
            return "not decided"
    if done.returncode == 0:
        return "**survived**"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return f"killed by {failed[0].split()[1] if failed else 'an error of the collection'}"


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
