"""The tables of models: which published files open, what vLLM has, and how rows are packed.

``PYTHONPATH=. python docs/site/families.py`` (``make families``) writes them into pages of
``docs``; a test asks that they are current. What vLLM has is read out of its registry's source,
without importing it.
"""

import ast
import importlib.util
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from moe_finetune.io.check_config import SAME_CLASS
from moe_finetune.models import FAMILIES, Family, find_family, newer_families
from moe_finetune.models.class_structure import part_of, without_weights
from moe_finetune.models.family import CORRECTION_BIASES
from tests.published import fixture
from tests.support import tiny, tiny_families
from tests.vllm.families import OTHERS, TESTED

DOCS = Path(__file__).resolve().parents[1]
MODELS, PACKED = DOCS / "models.md", DOCS / "packed-rows.md"
START, END = "<!-- families: make families -->\n", "<!-- end of families -->\n"
NATIVE = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")
BY_TRANSFORMERS = "_TRANSFORMERS_SUPPORTED_MODELS"
SHOWN = DOCS.parent / "tests" / "families" / "places.json"
PLACES = json.loads(SHOWN.read_text(encoding="utf-8"))


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
    parts = [family.score]
    source = tiny if family.name in tiny.FAMILY_NAMES else tiny_families
    tensors = without_weights(source.config(family.name)).state_dict()
    if any(name.endswith(CORRECTION_BIASES) for name in tensors):
        parts.append("bias")
    if family.own_weights is not None:
        parts.append("own weights")
    return ", ".join(parts)


def published() -> dict[str, list[str]]:
    """Checkpoints whose published files open, by family's name."""
    found: dict[str, list[str]] = {}
    for name in fixture.NAMES:
        content = fixture.read(name)
        config = content.config
        kind = SAME_CLASS.get(config["model_type"], config["model_type"])
        family = find_family(kind, part_of(config))
        if family is not None and not {"inspect", "reach"} & content.refused.keys():
            models = found.setdefault(family.name, [])
            models += [content.model] if content.model not in models else []
    return found


def model_type(family: Family) -> str:
    """What the family's ``config.json`` says, and of which part where that differs by it."""
    alike = [each for each in FAMILIES.values() if each.model_type == family.model_type]
    part = f" with `{family.part}`" if len(alike) > 1 else ""
    return f"`{family.model_type}`{part}"


def has_shared(family: Family) -> bool:
    """Whether its class has shared experts, also a class that this transformers lacks."""
    return not PLACES[family.name].endswith("; shared -")


def full(registry: dict[str, set[str]]) -> Iterator[str]:
    """The table of all models, a line each."""
    opens = published()
    head = "models | published files that open | router | trains and merges | vLLM 0.32 |"
    yield f"| `model_type` | {head}"
    yield "| --- | --- | --- | --- | --- | --- |"
    for family in sorted(FAMILIES.values(), key=lambda family: (family.model_type, family.part)):
        shared = " with shared experts" if has_shared(family) else ""
        shared = f", the language part{shared}" if family.part else shared
        trains = f"yes{shared}"
        files = ", ".join(opens.get(family.name, [])) or "class only"
        served = in_vllm(family, registry)
        yield (
            f"| {model_type(family)} | {family.title} | {files} | {router(family)} | {trains} | "
            f"{served} |"
        )


def later() -> Iterator[str]:
    """The table of families whose classes came with a later transformers than the tables' own."""
    yield "| `model_type` | models | transformers | score | trains and merges |"
    yield "| --- | --- | --- | --- | --- |"
    for family in sorted(newer_families.FAMILIES, key=lambda family: family.model_type):
        shared = " with shared experts" if has_shared(family) else ""
        part = ", the language part" if family.part else ""
        yield (
            f"| `{family.model_type}` | {family.title} | {family.since} | {family.score} | "
            f"yes{part}{shared} |"
        )


def packed() -> Iterator[str]:
    """The table of what keeps sequences of a row apart."""
    how = {
        (True, False): "the model's attention masks",
        (False, False): "attention masks that `moe-finetune` builds",
        (True, True): "attention masks; stateful modules run one sequence at a time",
        (False, True): "both: masks that it builds, and one sequence at a time",
    }
    yield "| separated by | `model_type` |"
    yield "| --- | --- |"
    for facts, words in how.items():
        alike = [
            model_type(family)
            for family in FAMILIES.values()
            if (family.rows.masks_by_position, bool(family.rows.per_sequence)) == facts
        ]
        yield f"| {words} | {', '.join(sorted(alike))} |"


def tables() -> dict[Path, str] | None:
    """Each page's part between its marks, or None without vLLM."""
    file = registry_file()
    if file is None:
        return None
    registry = architectures(file)
    words = "From later transformers versions, each from the class only:"
    made = {MODELS: chain(full(registry), ("", words, ""), later()), PACKED: packed()}
    return {page: "\n".join(lines) + "\n" for page, lines in made.items()}


def main() -> None:
    """Write the tables into their pages."""
    made = tables()
    if made is None:
        raise SystemExit("vLLM is not installed: its registry is part of the tables")
    for page, table in made.items():
        before, _, rest = page.read_text(encoding="utf-8").partition(START)
        page.write_text(before + START + table + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
