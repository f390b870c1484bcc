"""The README's table of families: what the tests cover, and what vLLM has.

``python -m tests.support_table`` writes it into the README; a test asks that it is current. What
vLLM has is read out of its registry's source, without importing it.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from moe_finetune.models import FAMILIES, Family
from tests.conftest import ROOT
from tests.vllm.families import OTHERS, TESTED

README = ROOT / "README.md"
START, END = "<!-- families: make families -->\n", "<!-- end of families -->\n"
NATIVE = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")
BY_TRANSFORMERS = "_TRANSFORMERS_SUPPORTED_MODELS"


def registry_file() -> Path | None:
    """vLLM's registry of models, or None where vLLM is not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "model_executor/models/registry.py"


def architectures(file: Path) -> dict[str, set[str]]:
    """Names of the classes in each of the registry's tables."""
    found: dict[str, set[str]] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            name = getattr(node.targets[0], "id", "")
            keys = [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
            found[name] = {str(key) for key in keys}
    return found


def in_vllm(family: Family, registry: dict[str, set[str]]) -> str:
    """What vLLM does with the family: tested here, has the class, or transformers' own class."""
    if family.name in TESTED:
        return "tested"
    if family.name in OTHERS:
        return OTHERS[family.name]
    if any(family.class_name in registry[table] for table in NATIVE):
        return "has it"
    if family.class_name in registry[BY_TRANSFORMERS]:
        return "by transformers' class"
    return "no"


def router(family: Family) -> str:
    """The score function, and what is particular about the selection."""
    if family.self_ranking:
        return "none: softmax of norms"
    parts = [family.score]
    if family.disk.router_bias is not None:
        parts.append("bias")
    if family.own_weights is not None:
        parts.append("own weights")
    return ", ".join(parts)


def lines(registry: dict[str, set[str]]) -> Iterator[str]:
    """The table, a line each."""
    yield "| family | checkpoints | router | trains and merges | vLLM 0.32 |"
    yield "| --- | --- | --- | --- | --- |"
    first = [name for name in TESTED if name in FAMILIES]
    for name in [*first, *(name for name in FAMILIES if name not in first)]:
        family = FAMILIES[name]
        shared = " with shared experts" if family.shared_targets else ""
        shared = f", the language part{shared}" if family.part else shared
        served = in_vllm(family, registry)
        trains = "from scratch" if family.self_ranking else f"yes{shared}"
        yield f"| `{name}` | {family.title} | {router(family)} | {trains} | {served} |"


def table() -> str | None:
    """The README's part between its marks, or None without vLLM."""
    file = registry_file()
    return None if file is None else "\n".join(lines(architectures(file))) + "\n"


def main() -> None:
    """Write the table into the README."""
    made = table()
    if made is None:
        raise SystemExit("vLLM is not installed: its registry is part of the table")
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    README.write_text(before + START + made + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
