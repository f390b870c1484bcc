"""The order of the house: a room imports only rooms below it, and no files import each other."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.conftest import ROOT

PACKAGE = ROOT / "moe_finetune"
# From the verbs down to the ground; rooms of one line do not know each other.
ORDER = (
    ("__init__",),
    ("cli",),
    ("experiments", "upcycle"),
    ("demo",),
    ("run",),
    ("report", "placement"),
    ("training",),
    ("evaluation",),
    ("data", "routing"),
    ("vllm",),
    ("lora", "checkpoint"),
    ("moe",),
    ("models",),
    ("quantization",),
    ("recipe",),
    ("losses",),
    ("metrics",),
    ("io",),
    ("registry",),
    ("errors",),
)


def name_of(file: Path) -> str:
    """The module's dotted name."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in PACKAGE.rglob("*.py")}


def imports_of(name: str) -> set[str]:
    """Modules of the package that ``name`` imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & set(MODULES)
            found |= inner or {node.module}
    return found & set(MODULES) - {name}


IMPORTS = {name: imports_of(name) for name in MODULES}


def room_of(name: str) -> str:
    """The folder or file below the package that holds ``name``."""
    return [*name.split("."), "__init__"][1]


def test_every_room_has_its_place():
    assert {room_of(name) for name in MODULES} == {room for line in ORDER for room in line}


def test_imports_go_down():
    floor = {room: number for number, line in enumerate(ORDER) for room in line}
    up = [
        f"{name} -> {target}"
        for name, targets in sorted(IMPORTS.items())
        for target in sorted(targets)
        if room_of(name) != room_of(target) and floor[room_of(name)] >= floor[room_of(target)]
    ]
    assert not up, "\n".join(up)


def test_no_files_import_each_other():
    reached = {name: set(targets) for name, targets in IMPORTS.items()}
    for middle in MODULES:
        for targets in reached.values():
            if middle in targets:
                targets |= reached[middle]
    circles = {name: sorted(IMPORTS[name]) for name in MODULES if name in reached[name]}
    assert not circles
