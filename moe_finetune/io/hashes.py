"""Canonical JSON and content hashes: of text, values, files and whole checkpoints."""

import hashlib
import inspect
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from moe_finetune.errors import CheckpointError
from moe_finetune.io.atomic import write_atomic

_WEIGHTS = (".safetensors", ".bin")
_IDENTITY_SUFFIXES = (*_WEIGHTS, ".json", ".jinja", ".model", ".txt")
# People and tools add these to a checkpoint's folder; they do not change a model's answers.
_NOT_IDENTITY = ("README.md", "trainer_state.json", "training_args.json", "environment.json")


def to_json(value: Any, indent: int | None = None, sort: bool = True) -> str:
    """Return JSON with unescaped characters, canonical when sorted; unknown objects become text."""
    return json.dumps(value, sort_keys=sort, ensure_ascii=False, indent=indent, default=_plain)


def _plain(value: Any) -> Any:
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:
        return value.item()
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=str)
    if inspect.isroutine(value):
        # A function's repr contains an address, so its name and source are used.
        try:
            return f"{value.__qualname__} {sha256_text(inspect.getsource(value))}"
        except (OSError, TypeError):
            return value.__qualname__
    return str(value)


def sha256_text(text: str) -> str:
    """Return the SHA-256 of ``text`` in UTF-8, as hex."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def sha256_json(value: Any) -> str:
    """Return the SHA-256 of the canonical JSON of ``value``."""
    return sha256_text(to_json(value))


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class KnownDigests:
    """:func:`sha256_file`, kept in the file ``memo``: equal path, size, time are not read again."""

    def __init__(self, memo: Path):
        self.memo = memo
        try:
            digests = json.loads(memo.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # losing it costs only time
            digests = {}
        self._known: dict[str, list[Any]] = digests if isinstance(digests, dict) else {}

    def __call__(self, path: Path) -> str:
        stat, key = path.stat(), str(path.resolve())
        match self._known.get(key):
            case [size, time, str(digest)] if (size, time) == (stat.st_size, stat.st_mtime_ns):
                return digest
        digest = sha256_file(path)
        self._known[key] = [stat.st_size, stat.st_mtime_ns, digest]
        return digest

    def save(self) -> None:
        write_atomic(self.memo, json.dumps(self._known) + "\n")


def checkpoint_hash(folder: str | Path, digest: Callable[[Path], str] = sha256_file) -> str:
    """Return one SHA-256 over the weights, config and tokenizer files of a checkpoint folder.

    The folder's path does not count: a copy has the same hash, and a checkpoint that was trained
    again in the same folder has another.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint '{folder}' must be a folder")
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise CheckpointError(
            f"{folder} has no config.json and no adapter_config.json; give the folder of a "
            "complete checkpoint"
        )
    files = sorted(
        f
        for f in folder.iterdir()
        if f.is_file() and f.name.endswith(_IDENTITY_SUFFIXES) and f.name not in _NOT_IDENTITY
    )
    with ThreadPoolExecutor(4) as pool:
        digests = list(pool.map(digest, files))
    return sha256_json([[f.name, digest] for f, digest in zip(files, digests, strict=True)])
