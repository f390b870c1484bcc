"""Convert a published checkpoint to one that transformers and vLLM load without remote code."""

import errno
import os
import shutil
from pathlib import Path

from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.checkpoint.small_files import (
    json_text,
    public_name,
    refuse_foreign_links,
    small_files,
    write_card,
    write_tokenizer,
)
from moe_finetune.errors import CheckpointError
from moe_finetune.io import check_output, one_writer, output_folder, sync
from moe_finetune.io.checkpoint_files import INDEX, SINGLE, index_text, read_config, tensors_of
from moe_finetune.io.folder import check_space
from moe_finetune.models.config_and_tokenizer import load_config, local_folder

_CARRIED = ("generation_config.json", "chat_template.jinja")
_COPY_BYTES = 1 << 30


@one_writer
def convert_checkpoint(source: str | Path, output: str | Path) -> Path:
    """Write the weights of ``source`` without its code to the folder ``output``, and return it.

    Weight files keep names and bytes, and share disk blocks where the file system can;
    ``config.json`` loses ``auto_map``; the tokenizer becomes ``tokenizer.json``.
    """
    from moe_finetune.checkpoint.weight_files import check_values  # needs torch

    output = Path(output)
    check_output(output)
    folder = local_folder(source)
    load_config(folder)
    files = open_checkpoint(folder).files
    refuse_foreign_links(folder, small_files(folder))
    size = sum((folder / name).stat().st_size for name in files)
    check_space(output, size)
    check_values(tensors_of(files).values(), CheckpointError)
    with output_folder(output, size) as partial:
        for name in files:
            _copy(folder / name, partial / name)
        if list(files) != [SINGLE]:
            index = index_text(tensors_of(files).values())
            (partial / INDEX).write_text(index, encoding="utf-8")
        config = read_config(folder)
        config.pop("auto_map", None)
        (partial / "config.json").write_text(json_text(config), encoding="utf-8")
        write_tokenizer(folder, partial)
        for file in small_files(folder):
            if file.name in _CARRIED or file.name.startswith("LICENSE"):
                shutil.copyfile(file, partial / file.name)
        origin = "The weights of {} as published, written by moe-finetune without code."
        write_card(partial, folder, f"{public_name(source)}, converted", origin=origin)
        for path in partial.iterdir():
            sync(path)
    return output


def _copy(source: Path, target: Path) -> None:
    """Copy a large file inside the kernel, which shares blocks where the file system can."""
    with source.open("rb") as old, target.open("xb") as new:
        try:
            while os.copy_file_range(old.fileno(), new.fileno(), _COPY_BYTES):
                pass
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            shutil.copyfileobj(old, new)  # continue where the kernel stopped
