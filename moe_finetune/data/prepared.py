"""Prepared data on disk: written once, found by a hash of its inputs, memory-mapped by readers.

A folder ``data/<key>`` of the cache holds ``rows/`` (a memory-mapped dataset) and ``counts.json``,
and appears whole. One process prepares it while others, of the same or another run, wait for its
lock. A folder that no run is reading can be deleted; the next run prepares it again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_finetune.errors import DataError, DiskSpaceError, OutputError
from moe_finetune.io import output_folder, output_lock, sync
from moe_finetune.io.cache_folder import cache_folder
from moe_finetune.io.json_file import read_object

if TYPE_CHECKING:
    from datasets import Dataset

FORMAT = 7
"""Increase this when the code gives different tokens, labels or counts for the same input."""

_COUNTS = "counts.json"


def data_key(tokenizer: Any, *decides: Any) -> str:
    """Hash of a tokenizer's content and of ``decides``, plain values."""
    parts = [
        FORMAT,
        [importlib.metadata.version(name) for name in ("transformers", "tokenizers")],
        type(tokenizer).__name__,
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.special_tokens_map,
        tokenizer.chat_template,
        decides,
    ]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def prepared_once(
    key: str, make: Callable[[Path], dict[str, Any]]
) -> tuple[Dataset, dict[str, Any], bool]:
    """Return the dataset for ``key``, its counts, and whether it already existed.

    Args:
        make: writes the dataset to ``rows`` in the given folder and returns the counts.

    Raises:
        DataError: the cache cannot be written. Errors of ``make`` pass through.
    """
    from datasets import load_from_disk

    folder = cache_folder() / "data" / key
    try:
        with output_lock(folder, wait=True):
            was_prepared = (folder / _COUNTS).is_file()
            if not was_prepared:
                _fill(folder, make)
    except OSError as error:
        problem = "no space left" if isinstance(error, DiskSpaceError) else "it cannot be created"
        reason = problem if isinstance(error, OutputError) else error.strerror or error
        raise DataError(
            f"data: the prepared data cannot be stored in {folder.parent} ({reason}); free some "
            "space, or set MOE_FINETUNE_CACHE to another folder"
        ) from error
    counts = read_object(folder / _COUNTS, DataError, "remove the folder")
    dataset: Any = load_from_disk(str(folder / "rows"))
    return dataset, counts, was_prepared


def _fill(folder: Path, make: Callable[[Path], dict[str, Any]]) -> None:
    with output_folder(folder, 0, overwrite=True) as partial:
        counts = make(partial)
        (partial / _COUNTS).write_text(json.dumps(counts) + "\n", encoding="utf-8")
        for path in partial.rglob("*"):
            sync(path)
