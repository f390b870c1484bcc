"""The small files of an export: configs, tokenizer, templates, licenses, and the model card."""

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_finetune.errors import CheckpointError
from moe_finetune.io.checkpoint_files import COPY_AGAIN, INDEX
from moe_finetune.io.json_file import read_object
from moe_finetune.models.config_and_tokenizer import load_tokenizer

CARD_FILE = "README.md"
_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".spm", ".vocab")
_LEGAL = ("LICENSE", "LICENCE", "NOTICE", "COPYING", "USE_POLICY")
_LEFT = (INDEX, "adapter_config.json", "moe_finetune.json", "trainer_state.json")
# Points to Python files from the checkpoint's authors; an export neither copies nor needs them.
_CODE = "auto_map"
_TOKENIZER_CLASS = "PreTrainedTokenizerFast"


def carried_files(
    folder: Path,
    config_changes: Mapping[str, Any] | None = None,
    needed: Callable[[str], bool] = lambda name: True,
) -> dict[str, bytes]:
    """Configs, tokenizer, chat templates and license texts of ``folder`` as path -> bytes.

    They are copied but for ``config_changes`` (None removes a key), entries that name remote code,
    and a tokenizer that loaders would read differently without its code. ``needed``: which paths to
    read.
    """
    paths = {path.relative_to(folder).as_posix(): path for path in small_files(folder)}
    paths = {name: path for name, path in paths.items() if needed(name)}
    refuse_foreign_links(folder, paths.values())
    files = {name: path.read_bytes() for name, path in paths.items() if path.name not in _LEFT}
    if _loaders_disagree(folder):
        with tempfile.TemporaryDirectory() as scratch:
            write_tokenizer(folder, Path(scratch))
            files.update({path.name: path.read_bytes() for path in Path(scratch).iterdir()})
    for name in ("config.json", "tokenizer_config.json"):
        if name in files:
            changes = dict(config_changes or {}) if name == "config.json" else {}
            files[name] = _changed(name, folder, files[name], changes)
    return files


def refuse_foreign_links(folder: Path, paths: Iterable[Path]) -> None:
    """Refuse a small file that links outside the checkpoint: the export would publish its content.

    Links inside, and those of the hub's cache to blobs of the same repository, are allowed.
    """
    root = folder.resolve()
    allowed = [root, *([root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [])]
    for path in paths:
        real = path.resolve()
        if not any(real.is_relative_to(parent) for parent in allowed):
            raise CheckpointError(
                f"{path}: is a link to {real}, outside the checkpoint, whose target would be "
                "copied along; replace the link with the file, or remove it"
            )


def small_files(folder: Path) -> list[Path]:
    """The files of ``folder`` that an export copies."""
    paths = [
        path
        for path in sorted(folder.iterdir())
        if path.suffix in _SUFFIXES or path.name.upper().startswith(_LEGAL)
    ]
    paths += sorted((folder / "additional_chat_templates").glob("*.jinja"))
    return [path for path in paths if path.is_file()]


def _loaders_disagree(folder: Path) -> bool:
    """Return whether any loader reads this tokenizer differently than training did."""
    if not (folder / "tokenizer.json").is_file():
        return (folder / "tiktoken.model").is_file()
    # transformers 5 ignores add_bos_token where there is a tokenizer.json; training did not.
    return bool(_tokenizer_settings(folder).get("add_bos_token"))


def _changed(name: str, folder: Path, content: bytes, changes: Mapping[str, Any]) -> bytes:
    # Opening the config checks its values; some may be infinite.
    checked = name == "config.json"
    mapping = read_object(folder / name, CheckpointError, COPY_AGAIN, finite=not checked)
    updated = mapping | dict(changes)
    for key in (_CODE, *(key for key, value in changes.items() if value is None)):
        updated.pop(key, None)
    return content if updated == mapping else json_text(updated).encode()


def json_text(value: Mapping[str, Any]) -> str:
    """``value`` as indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def write_tokenizer(source: Path, output: Path) -> None:
    """Write ``source``'s tokenizer so that every loader reads the same.

    ``tokenizer.json`` gets what :func:`load_tokenizer` returns; ``tokenizer_config.json`` keeps its
    settings but names a class that reads the former unchanged, and no code.
    """
    load_tokenizer(source).backend_tokenizer.save(str(output / "tokenizer.json"))
    for name in ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja"):
        if (source / name).is_file():
            shutil.copyfile(source / name, output / name)
    settings = _tokenizer_settings(source) | {"tokenizer_class": _TOKENIZER_CLASS}
    settings.pop(_CODE, None)
    (output / "tokenizer_config.json").write_text(json_text(settings), encoding="utf-8")


def _tokenizer_settings(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    return read_object(file, CheckpointError, COPY_AGAIN) if file.is_file() else {}


def write_card(folder: str | Path, base: str | Path, title: str = "", **facts: Any) -> Path:
    """Write :func:`model_card` into a checkpoint; ``title`` defaults to the folder's name."""
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
    """The text of an export's ``README.md``; of a local path only the last part is written.

    Args:
        base: folder or hub id; ``folder``: where a hub id's license is read.
        options: further settings worth stating (rank, steps, learning rate).
        origin: how the export came from the base, whose name replaces ``{}``.
        library: the ``library_name`` that the hub shows.
    """
    from huggingface_hub import ModelCardData

    name, license = public_name(base), license_of(base if folder is None else folder)
    front = ModelCardData(
        library_name=library,
        pipeline_tag="text-generation",
        tags=["moe", "moe-finetune"],
        base_model=name if is_hub_id(name) else None,
        datasets=[str(source) for source in data if is_hub_id(source)] or None,
        license=license,
    )
    lines = ["---", front.to_yaml(), "---", ""]
    lines += [f"# {title}", ""]
    lines += [origin.format(f"`{name}`"), ""]
    sources = ", ".join(f"`{public_name(source)}`" for source in data)
    facts: dict[str, Any] = {"Base": f"`{name}`", "Method": method, "Data": sources}
    facts["Paper"] = _paper_of(method)
    facts |= {key: _public_value(value) for key, value in (options or {}).items()}
    facts["License of the base"] = license or "not stated by the base; ask its authors before use"
    lines += ["| | |", "| --- | --- |"]
    lines += [f"| {key} | {_cell(value)} |" for key, value in facts.items() if value]
    lines += ["", "The folder holds no code and loads without `trust_remote_code`.", ""]
    return "\n".join(lines)


def _paper_of(method: str | None) -> str | None:
    """A link to the paper of a preset, which the hub shows with the model."""
    from moe_finetune.losses.presets import PRESETS

    paper = PRESETS[method].paper if method is not None and method in PRESETS else None
    if paper is None:
        return None
    if paper.arxiv is None:
        return paper.title
    return f"[{paper.title}](https://huggingface.co/papers/{paper.arxiv})"


def license_of(base: str | Path) -> str | None:
    """License that a checkpoint folder states: its card's front matter, or its LICENSE's title."""
    from huggingface_hub.repocard import metadata_load

    folder = Path(base)
    try:
        front = metadata_load(folder / CARD_FILE) or {}
    except Exception:  # no card, or one that no parser reads
        front = {}
    if front.get("license"):
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
    """A hub id unchanged, that of a folder in the hub's cache, or the last part of a path."""
    if is_hub_id(value):
        return str(value)
    *_, repository, kind, last = ("", "", *Path(value).absolute().parts)
    if kind == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return last


def _public_value(value: Any) -> str:
    if isinstance(value, Path) or (isinstance(value, str) and value.startswith(("/", "~", "."))):
        return public_name(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
