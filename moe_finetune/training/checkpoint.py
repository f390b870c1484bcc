"""A training checkpoint on disk: written whole or not at all, and verifiable afterwards.

``manifest.json``, with the size and SHA-256 of each file, is written last. A folder is used only if
its manifest verifies, so a checkpoint damaged by a faulty disk is skipped.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from moe_finetune.errors import CheckpointError
from moe_finetune.io import output_folder, sync, write_small
from moe_finetune.io.folder import remove_folder
from moe_finetune.io.hashes import sha256_file

MANIFEST = "manifest.json"
FORMAT = 1
_PREFIX = "checkpoint-"

Writer = Callable[[Path], None]
Entry = dict[str, int | str]
"""Size and hash of a file in the manifest."""


def write_checkpoint(
    target: Path, parts: Iterable[Writer], hashed: Mapping[str, Entry] | None = None
) -> None:
    """Write ``target``; each of ``parts`` writes its files into the folder it is called with.

    ``hashed``: manifest entries of files that other ranks have written, synced and hashed.

    Raises:
        OSError, DiskSpaceError: the disk is full or fails; ``target`` is unchanged.
    """
    entries = dict(hashed or {})
    with output_folder(target, 0, overwrite=True) as staged:  # it may replace a damaged one
        for write in parts:
            write(staged)
        for path in sorted(p for p in staged.rglob("*") if p.is_file()):
            name = path.relative_to(staged).as_posix()
            if name not in entries:
                sync(path)
                entries[name] = entry_of(path)
        manifest = {"format": FORMAT, "step": step_of(target), "files": entries}
        write_small(staged, MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())


def verify_checkpoint(folder: Path, hashes: bool = True, share: tuple[int, int] = (0, 1)) -> None:
    """Check ``folder`` against its manifest.

    Args:
        hashes: read every byte; otherwise only names and sizes.
        share: (rank, ranks); each rank reads its share of the bytes.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder}: has no {MANIFEST}; its save did not finish")
    try:
        manifest = json.loads(path.read_bytes())
        entries = {
            str(k): (int(v["bytes"]), str(v["sha256"])) for k, v in manifest["files"].items()
        }
        version, step = int(manifest["format"]), int(manifest["step"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise CheckpointError(f"{path}: is damaged ({type(problem).__name__})") from None
    if version != FORMAT:
        raise CheckpointError(f"{path}: has format {version}, but this version reads {FORMAT}")
    if step != step_of(folder) or not entries:
        raise CheckpointError(f"{path}: belongs to another checkpoint, or is damaged")
    for position, (name, (size, digest)) in enumerate(entries.items()):
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file}: is missing")
        if file.stat().st_size != size:
            raise CheckpointError(f"{file}: has {file.stat().st_size} bytes instead of {size}")
        if hashes and position % share[1] == share[0] and sha256_file(file) != digest:
            raise CheckpointError(f"{file}: is damaged (its SHA-256 differs from the manifest's)")


def checkpoints(root: Path) -> list[Path]:
    """Checkpoint folders under ``root``, newest first, complete or not."""
    if not root.is_dir():
        return []
    folders = [p for p in root.iterdir() if p.is_dir() and step_of(p) is not None]
    return sorted(folders, key=lambda p: step_of(p) or 0, reverse=True)


def newest_checkpoint(root: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, and why each newer one was skipped."""
    problems = []
    for folder in checkpoints(root):
        try:
            verify_checkpoint(folder)
        except CheckpointError as problem:
            problems.append(str(problem))
        except OSError as problem:
            problems.append(f"{folder}: cannot be read ({problem.strerror})")
        else:
            return folder, problems
    return None, problems


def rotate(root: Path, keep: int | None, best: Path | None = None) -> list[Path]:
    """Remove all but the ``keep`` newest complete checkpoints and ``best``; return those removed.

    Nothing is removed unless the newest one verifies, byte for byte. Damaged folders do not count
    toward ``keep`` and are removed too.
    """
    if keep is None or keep <= 0:
        return []
    folders = checkpoints(root)
    if not folders:
        return []
    newest, older = folders[0], folders[1:]
    try:
        verify_checkpoint(newest)
    except (CheckpointError, OSError):
        return []
    intact, removed = 1, []
    if best is not None and best.resolve() != newest.resolve() and keep > 1 and best.is_dir():
        intact += 1
    for folder in older:
        if best is not None and folder.resolve() == best.resolve():
            continue
        if intact < keep and _has_its_size(folder):
            intact += 1
            continue
        remove_folder(folder)
        removed.append(folder)
    return removed


def step_of(folder: Path) -> int | None:
    """The optimizer step in a checkpoint's name, or None for another folder."""
    digits = folder.name.removeprefix(_PREFIX)
    return int(digits) if digits != folder.name and digits.isdecimal() else None


def entry_of(path: Path) -> Entry:
    """The manifest's entry for a file: its size and SHA-256."""
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def _has_its_size(folder: Path) -> bool:
    try:
        verify_checkpoint(folder, hashes=False)
    except (CheckpointError, OSError):
        return False
    return True
