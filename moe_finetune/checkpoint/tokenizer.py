"""Write a checkpoint's tokenizer so that every loader reads what training read."""

import json
import shutil
from pathlib import Path
from typing import Any

from moe_finetune.errors import CheckpointError
from moe_finetune.io.checkpoint_files import COPY_AGAIN
from moe_finetune.io.json_file import read_object
from moe_finetune.models.loading import load_tokenizer

TOKENIZER_CLASS = "PreTrainedTokenizerFast"


def write_tokenizer(source: Path, output: Path) -> None:
    """Write ``source``'s tokenizer into the folder ``output`` so that every loader reads the same.

    ``tokenizer.json`` gets what :func:`load_tokenizer` returns: splitting, merges, added tokens,
    and a beginning-of-sequence token if the settings ask for one. ``tokenizer_config.json`` keeps
    its settings but names a class that reads ``tokenizer.json`` unchanged, and no code.

    Raises:
        CheckpointError: ``source`` has no tokenizer that loads without remote code.
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
    write_json(output / "tokenizer_config.json", settings)
    template = source / "chat_template.jinja"
    if template.is_file():
        shutil.copyfile(template, output / template.name)


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Write ``value`` as indented JSON."""
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
