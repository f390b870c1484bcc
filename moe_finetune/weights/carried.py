"""The small files of a checkpoint that an export takes along, and those it leaves behind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_finetune.weights.checkpoint import INDEX, read_json

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
    key), and any JSON file that names remote code loses that entry.
    """
    files = {}
    for path in sorted(folder.iterdir()):
        legal = path.name.upper().startswith(_LEGAL)
        if path.is_file() and (path.suffix in _SUFFIXES or legal) and path.name not in _LEFT:
            files[path.name] = path.read_bytes()
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        files[f"{path.parent.name}/{path.name}"] = path.read_bytes()
    for name in ("config.json", "tokenizer_config.json"):
        if name in files:
            changes = dict(config_changes or {}) if name == "config.json" else {}
            files[name] = _changed(folder / name, files[name], changes)
    return files


def _changed(file: Path, content: bytes, changes: Mapping[str, Any]) -> bytes:
    mapping = read_json(file)
    wanted = mapping | dict(changes)
    for key in (_CODE, *(key for key, value in changes.items() if value is None)):
        wanted.pop(key, None)
    if wanted == mapping:
        return content
    return (json.dumps(wanted, indent=2, ensure_ascii=False) + "\n").encode()
