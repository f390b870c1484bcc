"""The model card of an export: what it was made from, how, and under which license."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from moe_finetune.io.yaml_file import YamlError, parse_yaml

CARD_FILE = "README.md"


def write_card(folder: str | Path, base: str | Path, title: str = "", **facts: Any) -> Path:
    """Write :func:`model_card` into an exported checkpoint and return its path.

    ``title`` defaults to the folder's name; ``facts`` are the other arguments of
    :func:`model_card`.
    """
    file = Path(folder) / CARD_FILE
    file.write_text(model_card(base, title or Path(folder).name, **facts), encoding="utf-8")
    return file


def model_card(
    base: str | Path,
    title: str,
    method: str | None = None,
    data: Sequence[str | Path] = (),
    options: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    origin: str = "Fine-tuned from {} with moe-finetune; an ordinary checkpoint.",
    library: str = "transformers",
) -> str:
    """The text of an export's ``README.md``.

    Of a local path only the last part is written.

    Args:
        base: folder or hub id of the base.
        title: heading.
        method: preset or short description of the training objective.
        data: files, folders or hub ids trained on.
        options: further settings worth stating (rank, steps, learning rate).
        folder: local folder of the base when ``base`` is a hub id; the license is read from its
            card or license file.
        origin: how the export came from the base, whose name replaces ``{}``.
        library: the ``library_name`` that the hub shows.
    """
    name, license = public_name(base), license_of(base if folder is None else folder)
    front: dict[str, Any] = {"library_name": library, "tags": ["moe", "moe-finetune"]}
    if is_hub_id(base):
        front["base_model"] = str(base)
    if license:
        front["license"] = license
    lines = ["---", yaml.safe_dump(front, sort_keys=True).strip(), "---", ""]
    lines += [f"# {title}", ""]
    lines += [origin.format(f"`{name}`"), ""]
    sources = ", ".join(f"`{public_name(source)}`" for source in data)
    facts: dict[str, Any] = {"Base": f"`{name}`", "Method": method, "Data": sources}
    facts |= {key: _public_value(value) for key, value in (options or {}).items()}
    facts["License of the base"] = license or "not stated by the base; ask its authors before use"
    lines += ["| | |", "| --- | --- |"]
    lines += [f"| {key} | {_cell(value)} |" for key, value in facts.items() if value]
    lines += ["", "The folder holds no code and loads without `trust_remote_code`.", ""]
    return "\n".join(lines)


def license_of(base: str | Path) -> str | None:
    """License that a checkpoint folder states: its card's front matter, or its LICENSE's title."""
    folder = Path(base)
    card = folder / CARD_FILE
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


def is_hub_id(value: str | Path) -> bool:
    """Whether ``value`` looks like ``owner/name`` and is not a path on this disk."""
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", str(value))) and not Path(value).exists()


def public_name(value: str | Path) -> str:
    """A hub id unchanged, or the last part of a path."""
    return str(value) if is_hub_id(value) else Path(value).name


def _public_value(value: Any) -> str:
    if isinstance(value, Path) or (isinstance(value, str) and value.startswith(("/", "~", "."))):
        return public_name(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
