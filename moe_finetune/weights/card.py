"""The model card of an export: what it was made from, how, and under which licence."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from moe_finetune.yaml_file import YamlError, parse_yaml

_CARD = "README.md"


def write_card(
    folder: str | Path,
    base: str | Path,
    method: str | None = None,
    data: Sequence[str | Path] = (),
    metrics: Mapping[str, float] | None = None,
    title: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``README.md`` into an exported checkpoint and return its path.

    Folders of this machine are named by their last part only.

    Args:
        folder: the exported checkpoint.
        base: folder or hub id of the base; a folder's own card or licence file gives the licence.
        method: preset or short description of the training objective.
        data: files, folders or hub ids trained on.
        metrics: score by task name.
        title: heading; the folder's name by default.
        options: further settings worth stating (rank, steps, learning rate).
    """
    folder = Path(folder)
    name, licence = _public(base), licence_of(base)
    front: dict[str, Any] = {"library_name": "transformers", "tags": ["moe", "moe-finetune"]}
    if _is_hub_id(base):
        front["base_model"] = str(base)
    if licence:
        front["license"] = licence
    lines = ["---", yaml.safe_dump(front, sort_keys=True).strip(), "---", ""]
    lines += [f"# {title or folder.name}", ""]
    lines += [f"Fine-tuned from `{name}` with moe-finetune and merged into one checkpoint.", ""]
    sources = ", ".join(f"`{_public(each)}`" for each in data)
    facts: dict[str, Any] = {"Base": f"`{name}`", "Method": method, "Data": sources}
    facts |= {key: _public_value(value) for key, value in (options or {}).items()}
    facts["Licence of the base"] = licence or "not stated by the base; ask its authors before use"
    lines += ["| | |", "| --- | --- |"]
    lines += [f"| {key} | {_cell(value)} |" for key, value in facts.items() if value]
    if metrics:
        lines += ["", "## Evaluation", "", "| task | score |", "| --- | --- |"]
        lines += [f"| {_cell(task)} | {score:.4f} |" for task, score in metrics.items()]
    lines += ["", "The folder holds no code and loads without `trust_remote_code`.", ""]
    file = folder / _CARD
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def licence_of(base: str | Path) -> str | None:
    """Licence that a checkpoint folder states: its card's front matter, or its LICENSE's title."""
    folder = Path(base)
    card = folder / _CARD
    if card.is_file():
        match = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", card.read_text("utf-8", "replace"), re.S)
        try:
            front = parse_yaml(match[1])[1] if match else None
        except YamlError:
            front = None
        if isinstance(front, dict) and front.get("license"):
            return str(front.get("license_name") or front["license"])
    for name in ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENSE-MODEL"):
        if (folder / name).is_file():
            lines = (folder / name).read_text("utf-8", "replace").splitlines()
            return next((line.strip("# \t") for line in lines if line.strip("# \t")), None)
    return None


def _is_hub_id(value: str | Path) -> bool:
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", str(value))) and not Path(value).exists()


def _public(value: str | Path) -> str:
    """A hub id as it is, the last part of a path."""
    return str(value) if _is_hub_id(value) else Path(value).name


def _public_value(value: Any) -> str:
    if isinstance(value, Path) or (isinstance(value, str) and value.startswith(("/", "~", "."))):
        return _public(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
