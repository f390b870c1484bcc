"""A training checkpoint on disk: a folder whose manifest verifies.

``manifest.json``, with the size and SHA-256 of each file, is written last. A folder without one, of
a save that did not finish, or with a damaged file is skipped.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from moe_finetune.errors import CheckpointError
from moe_finetune.io import sync, write_small
from moe_finetune.io.folder import remove_folder
from moe_finetune.io.hashes import sha256_file

MANIFEST = "manifest.json"
FORMAT = 3
_PREFIX = "checkpoint-"


class OtherFormatError(CheckpointError):
    """A checkpoint of another version, which is neither damaged nor readable."""


Entry = dict[str, int | str]
"""Size and hash of a file in the manifest."""


def write_manifest(
    folder: Path, hashed: Mapping[str, Entry] | None = None, run: str | None = None
) -> None:
    """Make ``folder``, whose files are all written, a checkpoint.

    ``hashed``: entries of files that other ranks have written and hashed; ``run``: the run's id.
    """
    entries = dict(hashed or {})
    for name in entries:
        if not (folder / name).is_file():
            raise OSError(
                f"{name} was written on another node and is not visible here; put the run's folder "
                "on a file system that all nodes share"
            )
    for path in sorted(folder.rglob("*"), reverse=True):  # files before their folders
        sync(path)
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in (MANIFEST, *entries):
            entries[name] = entry_of(path)
    noted = {} if run is None else {"run": run}
    manifest = {"format": FORMAT, "step": step_of(folder), **noted, "files": entries}
    write_small(folder, MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    sync(folder)
    sync(folder.parent)


def verify_checkpoint(folder: Path, hashes: bool = True, share: tuple[int, int] = (0, 1)) -> None:
    """Check ``folder`` against its manifest, without ``hashes`` only names and sizes.

    ``share``: (rank, ranks); each rank reads its share of the bytes.
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
        raise OtherFormatError(
            f"{folder}: another version of moe-finetune wrote this checkpoint (format {version}, "
            f"not {FORMAT}); continue with that version, or start a new run in another folder"
        )
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


def written_by(folder: Path) -> str | None:
    """The id of the run in a checkpoint's manifest; None without one."""
    try:
        return json.loads((folder / MANIFEST).read_bytes()).get("run")
    except (OSError, ValueError, AttributeError):  # reported when it is verified
        return None


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
        except OtherFormatError:
            raise
        except CheckpointError as problem:
            problems.append(str(problem))
        except OSError as problem:
            problems.append(f"{folder}: cannot be read ({problem.strerror})")
        else:
            return folder, problems
    return None, problems


def rotate(root: Path, keep: int | None, best: Path | None = None) -> list[Path]:
    """Remove all but the ``keep`` newest complete checkpoints and ``best``; return those removed.

    Nothing is removed unless the newest one verifies. Damaged folders do not count, and go too.
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
