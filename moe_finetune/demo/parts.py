"""The parts of an earlier demo in the same folder that are still valid, by content.

A part (a fine-tune, an evaluation, the page) is known by a hash of what it follows from. What is
finished under the same hash is kept, what was interrupted goes on, and what follows from something
else now is removed and made again.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from moe_finetune.errors import OutputExistsError
from moe_finetune.evaluation.suites import eval_root
from moe_finetune.io.done import DoneNote
from moe_finetune.io.environment import package_versions
from moe_finetune.io.folder import is_taken
from moe_finetune.io.hashes import sha256_json
from moe_finetune.io.terminal import terminal

PARTS_FOLDER = "steps"
DEPENDENCIES = ("torch", "transformers", "trl", "peft", "accelerate", "lm-eval", "vllm")


class Parts:
    """The parts of the demo in ``folder``, as its ``steps/`` notes them.

    Raises:
        OutputExistsError: the folder has other files.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        # Runs and upcycles have a folder of that name, too, but no such note.
        if not any((folder / PARTS_FOLDER).glob("*.begun.json")) and is_taken(folder):
            raise OutputExistsError(f"{folder} contains other files; choose another --output")
        self._begun: dict[str, str] = {}

    def kept(self, name: str, identity: str) -> bool:
        """Whether a part was finished under ``identity``; says so."""
        if not self._note(name).is_of(identity) or not (self._folder / name).is_dir():
            return False
        terminal().say(f"{name}: kept, because its inputs have not changed")
        return True

    def begin(self, name: str, identity: str) -> None:
        """Note that a part is being made; what was made from something else is removed."""
        product, begun = self._folder / name, self._note(f"{name}.begun")
        if not begun.is_of(identity) and product.exists():
            terminal().say(f"{name}: redone, because its inputs have changed")
            shutil.rmtree(product)
        self._note(name).remove()
        begun.write(identity)
        self._begun[name] = identity

    def finish(self, name: str) -> None:
        self._note(name).write(self._begun[name])

    def _note(self, name: str) -> DoneNote:
        file = self._folder / PARTS_FOLDER / f"{name}.json"
        return DoneNote(file, OutputExistsError, f"delete {self._folder} to start over")


def code_identity() -> str:
    """Hash of this package's files, of the evaluation tasks, and of what they build on."""
    digest = hashlib.sha256()
    package = Path(__file__).resolve().parents[1]
    for root in (package, eval_root() / "tasks", eval_root() / "suites"):
        files = (p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
        for path in sorted(files):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return sha256_json([digest.hexdigest(), package_versions(*DEPENDENCIES)])
