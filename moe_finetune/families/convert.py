"""A published checkpoint folder -> one that transformers and vLLM load without its code."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from moe_finetune.checkpoint_files import (
    COPY_AGAIN,
    INDEX,
    SINGLE,
    read_config,
    read_headers,
    tensors_of,
)
from moe_finetune.errors import CheckpointError, OutputExistsError
from moe_finetune.families.loading import load_config, load_tokenizer, local_folder
from moe_finetune.json_file import read_object
from moe_finetune.safetensors_header import Header

_CARRIED = ("generation_config.json", "chat_template.jinja", "LICENSE*")
TOKENIZER_CLASS = "PreTrainedTokenizerFast"


def convert_checkpoint(source: str | Path, output: str | Path) -> Path:
    """Write ``output``, a folder with the weights of ``source`` and no code, and return it.

    The safetensors files are hard links where the file system allows it, else copies; their names
    and bytes stay. ``config.json`` stays but for ``auto_map``. The tokenizer becomes
    ``tokenizer.json``. An index is written where shards have none. The folder appears complete or
    not at all.

    Raises:
        CheckpointError: ``source`` is missing, incomplete or damaged.
        UnsupportedModelError: no family has its model type.
        OutputExistsError: ``output`` exists.
    """
    output = Path(output)
    if output.exists():
        raise OutputExistsError(f"{output} exists already; choose a new folder")
    folder = local_folder(source)
    load_config(folder)
    files = read_headers(folder)
    output.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        for name in files:
            _link(folder / name, work / name)
        write_index(files, work)
        config = read_config(folder)
        config.pop("auto_map", None)
        _write_json(work / "config.json", config)
        write_tokenizer(folder, work)
        for pattern in _CARRIED:
            for file in folder.glob(pattern):
                shutil.copyfile(file, work / file.name)
        work.chmod(0o755)
        work.rename(output)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return output


def write_tokenizer(source: Path, output: Path) -> None:
    """Write ``source``'s tokenizer into the folder ``output`` so that every loader reads the same.

    ``tokenizer.json`` holds what :func:`load_tokenizer` returns: its splitting, merges, added
    tokens and a begin-of-sequence token where the settings ask for one. ``tokenizer_config.json``
    keeps its settings, but names a class that takes ``tokenizer.json`` as it is, and no code.

    Raises:
        CheckpointError: ``source`` has no tokenizer that can be read without its code.
    """
    load_tokenizer(source).backend_tokenizer.save(str(output / "tokenizer.json"))
    for name in ("special_tokens_map.json", "added_tokens.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, output / name)
    settings_file = source / "tokenizer_config.json"
    settings = {}
    if settings_file.is_file():
        settings = read_object(settings_file, CheckpointError, COPY_AGAIN)
    settings.pop("auto_map", None)
    settings["tokenizer_class"] = TOKENIZER_CLASS
    _write_json(output / "tokenizer_config.json", settings)
    template = source / "chat_template.jinja"
    if template.is_file():
        shutil.copyfile(template, output / template.name)


def write_index(files: dict[str, Header], output: Path) -> None:
    """Write the index of a checkpoint that has more files than ``model.safetensors``."""
    if list(files) == [SINGLE]:
        return
    tensors = sorted(tensors_of(files).items())
    total = sum(info.size for _, info in tensors)
    weight_map = {name: info.file.name for name, info in tensors}
    _write_json(output / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _link(source: Path, target: Path) -> None:
    real = source.resolve()  # the hub's cache holds links to its blobs
    try:
        os.link(real, target)
    except OSError:  # another file system, or one without hard links
        try:
            shutil.copyfile(real, target)
        except OSError as error:
            raise CheckpointError(f"{target} cannot be written ({error})") from error
