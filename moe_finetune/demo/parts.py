"""The parts of an earlier demo in the same folder that are still valid, by content.

A part (a fine-tune, an evaluation, the page) is identified by a hash of its inputs. With the same
hash, a finished part is kept and an interrupted one resumes; with another, it is removed and made
again.
"""

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
    """The parts of the demo in ``folder``, as recorded in ``steps/``.

    Raises:
        OutputExistsError: the folder has other files.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        # Runs and upcycles also have a folder of that name, but no such note.
        if not any((folder / PARTS_FOLDER).glob("*.begun.json")) and is_taken(folder):
            raise OutputExistsError(f"{folder} contains other files; choose another --output")
        self._begun: dict[str, str] = {}

    def kept(self, name: str, identity: str) -> bool:
        """Return whether a part was finished under ``identity``, and print a line if so."""
        if not self._note(name).is_of(identity) or not (self._folder / name).is_dir():
            return False
        terminal().say(f"{name}: kept, because its inputs have not changed")
        return True

    def begin(self, name: str, identity: str) -> None:
        """Record that a part is being made; remove one that was made from other inputs."""
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
    """Hash of this package's files, the evaluation tasks and the versions of dependencies."""
    digest = hashlib.sha256()
    package = Path(__file__).resolve().parents[1]
    for root in (package, eval_root() / "tasks", eval_root() / "suites"):
        files = (p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
        for path in sorted(files):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return sha256_json([digest.hexdigest(), package_versions(*DEPENDENCIES)])
