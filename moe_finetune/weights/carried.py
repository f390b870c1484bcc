"""The small files of a checkpoint that an export takes along, and those it leaves behind."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_finetune.checkpoint_files import COPY_AGAIN, INDEX
from moe_finetune.errors import CheckpointError
from moe_finetune.json_file import read_object

_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".spm", ".vocab")
_LEGAL = ("LICENSE", "LICENCE", "NOTICE", "COPYING", "USE_POLICY")
_LEFT = (INDEX, "adapter_config.json", "moe_finetune.json", "trainer_state.json")
# Points to Python files of the checkpoint's authors, which an export neither carries nor needs.
_CODE = "auto_map"


def carried_files(
    folder: Path, config_changes: Mapping[str, Any] | None = None
) -> dict[str, bytes]:
    """Configs, tokenizer, chat templates and licence texts of ``folder`` as path -> bytes.

    Bytes are the base's own. Only ``config.json`` changes, by ``config_changes`` (None removes a
    key), any JSON file that names remote code loses that entry, and a tokenizer that loaders would
    read differently without its code is written so that all of them read the same.
    """
    files = {}
    for path in sorted(folder.iterdir()):
        legal = path.name.upper().startswith(_LEGAL)
        if path.is_file() and (path.suffix in _SUFFIXES or legal) and path.name not in _LEFT:
            files[path.name] = path.read_bytes()
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        files[f"{path.parent.name}/{path.name}"] = path.read_bytes()
    if _loaders_disagree(folder):
        files.update(_plain_tokenizer(folder))
    for name in ("config.json", "tokenizer_config.json"):
        if name in files:
            changes = dict(config_changes or {}) if name == "config.json" else {}
            files[name] = _changed(name, folder, files[name], changes)
    return files


def _loaders_disagree(folder: Path) -> bool:
    """Whether some loader reads this tokenizer differently from the way training read it."""
    if not (folder / "tokenizer.json").is_file():
        return (folder / "tiktoken.model").is_file()
    settings = folder / "tokenizer_config.json"
    held = read_object(settings, CheckpointError, COPY_AGAIN) if settings.is_file() else {}
    # transformers 5 ignores add_bos_token beside a tokenizer.json; training did not.
    return bool(held.get("add_bos_token"))


def _plain_tokenizer(folder: Path) -> dict[str, bytes]:
    from moe_finetune.families.convert import write_tokenizer

    with tempfile.TemporaryDirectory() as made:
        write_tokenizer(folder, Path(made))
        return {path.name: path.read_bytes() for path in Path(made).iterdir()}


def _changed(name: str, folder: Path, content: bytes, changes: Mapping[str, Any]) -> bytes:
    mapping = read_object(folder / name, CheckpointError, COPY_AGAIN)
    wanted = mapping | dict(changes)
    for key in (_CODE, *(key for key, value in changes.items() if value is None)):
        wanted.pop(key, None)
    if wanted == mapping:
        return content
    return (json.dumps(wanted, indent=2, ensure_ascii=False) + "\n").encode()
