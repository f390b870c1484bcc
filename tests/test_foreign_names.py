"""Names that no documentation promises are listed in ``foreign_names.yaml``, and all exist.

Run on the lowest, the pinned and the newest versions.
"""

import ast
import importlib
import inspect
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import transformers
import trl
import yaml
from packaging.version import Version

from tests.conftest import ROOT

PACKAGES = ("transformers", "peft", "trl", "accelerate", "vllm")
LISTED = yaml.safe_load((ROOT / "tests" / "foreign_names.yaml").read_text())
OURS = {"HF_HUB_OFFLINE", "daemon", "restype", "__file__", "environ", "filename", "dataset_kwargs"}
"""Assigned on objects of the standard library, of huggingface_hub's constants, or of ours."""
THEIRS = {"_exit", "_remote_ask", "_remote_id"}
"""Read from the standard library, or from the sandbox's own modules."""
CURRENT = Version(transformers.__version__)


@cache
def trees() -> dict[str, ast.Module]:
    """Every file of the package, parsed."""
    files = sorted((ROOT / "moe_finetune").rglob("*.py"))
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in files}


def nodes(*kinds: type) -> Iterator[Any]:
    for tree in trees().values():
        yield from (node for node in ast.walk(tree) if isinstance(node, kinds))


@cache
def defined() -> frozenset[str]:
    """Names of functions, classes, variables and attributes that the package itself defines; a
    protocol's are another's."""
    described = {
        id(part)
        for node in nodes(ast.ClassDef)
        if any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)
        for part in node.body
    }
    names = {n.name for n in nodes(ast.FunctionDef, ast.ClassDef) if id(n) not in described}
    for node in nodes(ast.Assign, ast.AnnAssign):
        if id(node) in described:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for part in (part for target in targets for part in ast.walk(target)):
            if isinstance(part, ast.Name):
                names.add(part.id)
            elif isinstance(part, ast.Attribute) and _own(part.value):
                names.add(part.attr)
    return frozenset(names)


def _own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


def imported() -> set[str]:
    """``module.name`` of what is imported from inside another package."""
    found = set()
    for node in nodes(ast.ImportFrom):
        module = node.module or ""
        if module.partition(".")[0] in PACKAGES and "." in module:
            found |= {f"{module}.{name.name}" for name in node.names}
    for node in nodes(ast.Import):
        found |= {n.name for n in node.names if "." in n.name and n.name.split(".")[0] in PACKAGES}
    return found


def read() -> set[str]:
    """Attributes that begin with "_" and are not the package's, also by ``getattr``."""
    found = {node.attr for node in nodes(ast.Attribute) if private(node.attr)}
    constants = {node.value for node in nodes(ast.Constant) if private(node.value)}
    candidates = found | {name for name in constants if name in LISTED["attributes"]}
    for call in nodes(ast.Call):
        if isinstance(call.func, ast.Name) and call.func.id in ("getattr", "hasattr", "setattr"):
            name = getattr(call.args[1], "value", None)
            candidates |= {name} if private(name) else set()
    return candidates - defined() - THEIRS | (constants & set(LISTED["attributes"]))


def assigned() -> set[str]:
    """Attributes that are assigned on something else than ``self`` and are not the package's."""
    found = set()
    for node in nodes(ast.Assign, ast.AugAssign, ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                if isinstance(part, ast.Attribute) and not _own(part.value):
                    found.add(part.attr)
                elif isinstance(part, ast.Subscript) and isinstance(part.value, ast.Attribute):
                    found |= {"__dict__"} if part.value.attr == "__dict__" else set()
    for call in nodes(ast.Call):
        if isinstance(call.func, ast.Name) and call.func.id in ("setattr", "delattr"):
            name = getattr(call.args[1], "value", None)
            found |= {name} if isinstance(name, str) else set()
    return found - defined() - OURS


def overridden(kind: type) -> set[str]:
    """Private methods of ``kind`` that a class of the package defines."""
    methods = {part.name for node in nodes(ast.ClassDef) for part in node.body
               if isinstance(part, ast.FunctionDef)}  # fmt: skip
    return {name for name in methods if private(name) and hasattr(kind, name)}


def opened(name: str) -> Any:
    """The module, or what a module has by the last part of ``name``."""
    module, _, last = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except ImportError:
        return getattr(importlib.import_module(module), last)


def test_imports_are_listed():
    listed = {f"{m}.{n}" for m, entry in LISTED["imports"].items() for n in entry["names"]}
    assert imported() == listed


def test_private_attributes_are_listed():
    assert read() == set(LISTED["attributes"])


def test_assignments_are_listed():
    names = {*LISTED["assigned"]} - {"_gradient_checkpointing_func"}  # in an instance's __dict__
    assert assigned() == names


def test_overridden_methods_are_listed():
    sft = overridden(trl.SFTTrainer) | overridden(transformers.Trainer)
    trainer = set(LISTED["overridden"]["transformers.Trainer"]["names"])
    dpo, grpo = (
        set(LISTED["overridden"][f"trl.{name}"]["names"]) for name in ("DPOTrainer", "GRPOTrainer")
    )
    assert sft - grpo - dpo == trainer or Version("5.19") > CURRENT
    assert overridden(trl.GRPOTrainer) - trainer - dpo == grpo or Version("5.19") > CURRENT
    assert dpo <= overridden(trl.DPOTrainer)


@pytest.mark.parametrize("module", LISTED["imports"])
def test_what_is_imported_exists(module):
    entry = LISTED["imports"][module]
    if Version(entry.get("since", "0")) > CURRENT or find_spec(module.partition(".")[0]) is None:
        return
    for name in entry["names"]:
        if not entry.get("optional"):
            opened(f"{module}.{name}")
    assert entry["why"] and entry["public"]


@pytest.mark.parametrize("name", LISTED["attributes"])
def test_a_private_attribute_is_where_it_is_looked_for(name):
    entry = LISTED["attributes"][name]
    if entry.get("optional") or find_spec(entry["of"].partition(".")[0]) is None:
        return
    place = opened(entry["of"])
    assert hasattr(place, name) or name in inspect.getsource(place)


@pytest.mark.parametrize("kind", LISTED["overridden"])
def test_an_overridden_method_exists(kind):
    entry = LISTED["overridden"][kind]
    if Version(entry.get("since", "0")) <= CURRENT:
        assert not [name for name in entry["names"] if not hasattr(opened(kind), name)]
