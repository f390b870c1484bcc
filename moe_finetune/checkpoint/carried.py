"""The small files of a checkpoint that an export copies."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_finetune.checkpoint.tokenizer import write_tokenizer
from moe_finetune.errors import CheckpointError
from moe_finetune.io.checkpoint_files import COPY_AGAIN, INDEX
from moe_finetune.io.json_file import read_object

_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".spm", ".vocab")
_LEGAL = ("LICENSE", "LICENCE", "NOTICE", "COPYING", "USE_POLICY")
_LEFT = (INDEX, "adapter_config.json", "moe_finetune.json", "trainer_state.json")
# Points to Python files from the checkpoint's authors; an export neither copies nor needs them.
_CODE = "auto_map"


def carried_files(
    folder: Path, config_changes: Mapping[str, Any] | None = None
) -> dict[str, bytes]:
    """Configs, tokenizer, chat templates and license texts of ``folder`` as path -> bytes.

    Files are copied byte for byte, with three exceptions: ``config_changes`` are applied to
    ``config.json`` (None removes a key), JSON files lose entries that name remote code, and a
    tokenizer that loaders would read differently without its code is rewritten so that they agree.
    A link that leaves the folder raises CheckpointError.
    """
    refuse_foreign_links(folder)
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in small_files(folder)
        if path.name not in _LEFT
    }
    if _loaders_disagree(folder):
        files.update(_plain_tokenizer(folder))
    for name in ("config.json", "tokenizer_config.json"):
        if name in files:
            changes = dict(config_changes or {}) if name == "config.json" else {}
            files[name] = _changed(name, folder, files[name], changes)
    return files


def refuse_foreign_links(folder: Path) -> None:
    """Raise CheckpointError for a small file that links to a place outside the checkpoint.

    The export would contain, and publish, that file's content. Links inside the folder, and links
    of the hub's cache to blobs of the same repository, are allowed.
    """
    root = folder.resolve()
    allowed = [root, *([root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [])]
    for path in small_files(folder):
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
    file = folder / "tokenizer_config.json"
    settings = read_object(file, CheckpointError, COPY_AGAIN) if file.is_file() else {}
    # transformers 5 ignores add_bos_token where there is a tokenizer.json; training did not.
    return bool(settings.get("add_bos_token"))


def _plain_tokenizer(folder: Path) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as scratch:
        write_tokenizer(folder, Path(scratch))
        return {path.name: path.read_bytes() for path in Path(scratch).iterdir()}


def _changed(name: str, folder: Path, content: bytes, changes: Mapping[str, Any]) -> bytes:
    # Opening the config checks its values; some may be infinite.
    checked = name == "config.json"
    mapping = read_object(folder / name, CheckpointError, COPY_AGAIN, finite=not checked)
    updated = mapping | dict(changes)
    for key in (_CODE, *(key for key, value in changes.items() if value is None)):
        updated.pop(key, None)
    if updated == mapping:
        return content
    return (json.dumps(updated, indent=2, ensure_ascii=False) + "\n").encode()
