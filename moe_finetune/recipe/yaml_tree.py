"""YAML files that extend each other, merged into one tree that records where each value is from.

Later files win over earlier ones, a file wins over what it extends, and ``key.path=value``
overrides win over all files. Mappings merge key by key; anything else is replaced. ``method: erc``
is short for ``method: {preset: erc}``.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from moe_finetune.errors import RecipeError
from moe_finetune.io.folder import like
from moe_finetune.io.yaml_file import YamlError, parse_file, parse_yaml

Key = tuple[str | int, ...]
_DATA = (".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt")


@dataclass
class Tree:
    """Merged values and, for each key, the place it was last set (``file:line`` or an override)."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Key, str] = field(default_factory=dict)
    inherited_share: bool = False
    """Whether a later file or override than the one with ``method.share`` has named the preset."""

    def origin(self, key: Key) -> str:
        """Where ``key``, or the nearest key above it, was set; "" when it was set nowhere."""
        for end in range(len(key), 0, -1):
            if key[:end] in self.origins:
                return self.origins[key[:end]]
        return ""

    def merge(self, other: Tree) -> None:
        changes, method = dict(other.values), other.values.get("method")
        if isinstance(method, str):
            changes["method"] = method = {"preset": method}
        if isinstance(method, dict) and {"preset", "share"} & method.keys():
            before = self.values.get("method")
            has_share = isinstance(before, dict) and before.get("share") is not None
            self.inherited_share = other.inherited_share or (has_share and "share" not in method)
        self.values = merge_mappings(self.values, changes)
        self.origins.update(other.origins)


def merge_mappings(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return ``base`` updated recursively with ``changes``; neither is modified."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = merge_mappings(old, value) if both else value  # type: ignore[arg-type]
    return merged


def load_tree(paths: Iterable[str | Path], overrides: Sequence[str] = ()) -> Tree:
    """Read recipe files and the files they extend, then apply ``key.path=value`` overrides.

    ``recipes/...`` falls back to the package's file of that name.
    """
    tree, read = Tree(), dict[Path, Tree]()
    for path in paths:
        tree.merge(_read(find_recipe(Path(path)), (), read))
    for override in overrides:
        _apply(tree, override)
    return tree


def recipes_folder() -> Path:
    """``recipes/`` of a checkout, or the copy that was installed with the package."""
    candidates = [
        Path(__file__).resolve().parents[2] / "recipes",
        Path(sysconfig.get_path("data")) / "share" / "moe-finetune" / "recipes",
    ]
    for folder in candidates:
        if (folder / "demo").is_dir():
            return folder
    raise RecipeError(f"no recipes in {', '.join(map(str, candidates))}; reinstall the package")


def find_recipe(path: Path) -> Path:
    """``path`` if it exists; otherwise ``recipes/...`` means the package's file."""
    if path.parts[:1] != ("recipes",) or path.exists():
        return path
    shipped = recipes_folder().joinpath(*path.parts[1:])
    return shipped if shipped.is_file() else path


def _read(path: Path, extending: tuple[Path, ...], read: dict[Path, Tree]) -> Tree:
    """The file and what it extends; ``read`` has the files that were read before."""
    resolved = path.resolve()
    if resolved in extending:
        chain = " -> ".join(map(str, (*extending[extending.index(resolved) :], resolved)))
        raise RecipeError(f"{path}: `extends` is circular: {chain}; remove one of them")
    if resolved in read:
        return read[resolved]
    tree, child = Tree(), _parse(path)
    parents = child.values.pop("extends", [])
    if isinstance(parents, str):
        parents = [parents]
    where = f"{child.origin(('extends',))}: extends"
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise RecipeError(f"{where}: must be a file or a list of files")
    for parent in parents:
        file = path.parent / parent
        if not file.is_file():
            file = find_recipe(Path(parent))
        if not file.is_file():
            raise RecipeError(f"{where}: there is no file {path.parent / parent}")
        tree.merge(_read(file, (*extending, resolved), read))
    tree.merge(child)
    read[resolved] = tree
    return tree


def _parse(path: Path) -> Tree:
    if path.is_dir():
        raise RecipeError(f"{path} is a folder; give a recipe file ('moe-finetune init' makes one)")
    if not path.is_file():
        files = (file for folder in (Path(), path.parent) for file in sorted(folder.glob("*.y*ml")))
        raise RecipeError(f"there is no recipe file {path}{like(path, files)}")
    if path.suffix in _DATA:
        raise RecipeError(
            f"{path} is data, not a recipe; give a recipe and data.train={path} ('moe-finetune "
            f"init CHECKPOINT --data {path}' writes one)"
        )
    node, values = parse_file(path, RecipeError)
    tree = Tree()
    if node is not None:
        if not isinstance(values, dict):
            kind = type(values).__name__
            raise RecipeError(f"{path}:1: must contain `key: value` lines, not {kind}")
        tree.values = values
        _mark(node, (), path, tree.origins)
    return tree


def _mark(node: yaml.Node, key: Key, path: Path, origins: dict[Key, str]) -> None:
    if isinstance(node, yaml.SequenceNode):
        for i, child in enumerate(node.value):
            origins[(*key, i)] = f"{path}:{child.start_mark.line + 1}"
            _mark(child, (*key, i), path, origins)
    elif isinstance(node, yaml.MappingNode):
        for name, child in node.value:
            origins[(*key, name.value)] = f"{path}:{name.start_mark.line + 1}"
            _mark(child, (*key, name.value), path, origins)


def _apply(tree: Tree, override: str) -> None:
    """Set one ``a.b=value``; the value is parsed as YAML."""
    path, equals, text = override.partition("=")
    key = tuple(path.strip().split("."))
    if not equals or not all(key):
        raise RecipeError(f"'{override}': write overrides as key.path=value")
    if any(part.isdigit() for part in key):
        raise RecipeError(
            f"'{override}': give the whole list, such as data.train=[a.jsonl,b.jsonl]"
        )
    try:
        _, value = parse_yaml(text)
    except YamlError as error:
        raise RecipeError(f"'{override:.80}': {error.problem}") from None
    for name, inner in value.items() if isinstance(value, dict) else ():
        if inner is None and ":" in str(name):
            spaced = str(name).replace(":", ": ", 1)
            raise RecipeError(f"'{override:.80}': write a space after the colon: {{{spaced}}}")
    for part in reversed(key):
        value = {part: value}
    tree.merge(Tree(value))
    tree.origins = {k: origin for k, origin in tree.origins.items() if k[: len(key)] != key}
    tree.origins[key] = f"override '{override}'"


def dotted(key: Key) -> str:
    """``("data", "train", 0)`` -> ``data.train.0``."""
    return ".".join(map(str, key))
