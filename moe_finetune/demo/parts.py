"""What an earlier demo in the same folder left that still holds: known by content.

A part (a fine-tune, an evaluation, the page) is known by a hash of what it follows from. What is
finished under the same hash is kept, what was interrupted goes on, and what follows from something
else now is removed and made again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from moe_finetune.errors import OutputExistsError
from moe_finetune.evaluation.suites import eval_root
from moe_finetune.io import write_atomic
from moe_finetune.io.environment import package_versions
from moe_finetune.io.folder import is_taken
from moe_finetune.io.hashes import sha256_json
from moe_finetune.io.json_file import read_object
from moe_finetune.io.terminal import terminal

PARTS_FILE = "demo.json"
DEPENDENCIES = ("torch", "transformers", "trl", "peft", "accelerate", "lm-eval", "vllm")


class Parts:
    """The parts of the demo in ``folder``, as ``demo.json`` notes them.

    Raises:
        OutputExistsError: the folder holds something else.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        file = folder / PARTS_FILE
        if not file.is_file() and is_taken(folder):
            raise OutputExistsError(f"{folder} holds something else; choose another --output")
        remedy = f"delete {folder} to start over"
        held = read_object(file, OutputExistsError, remedy) if file.is_file() else {}
        self._begun: dict[str, str] = held.get("begun", {})
        self._finished: dict[str, str] = held.get("finished", {})

    def kept(self, name: str, identity: str) -> bool:
        """Whether a part was finished under ``identity``; says so."""
        if self._finished.get(name) != identity or not (self._folder / name).is_dir():
            return False
        terminal().say(f"{name}: kept, its inputs have not changed")
        return True

    def begin(self, name: str, identity: str) -> None:
        """Note that a part is being made; what was made from something else is removed."""
        place = self._folder / name
        if self._begun.get(name) != identity and place.exists():
            terminal().say(f"{name}: made again, its inputs have changed")
            shutil.rmtree(place)
        self._finished.pop(name, None)
        self._begun[name] = identity
        self._write()

    def finish(self, name: str) -> None:
        self._finished[name] = self._begun[name]
        self._write()

    def _write(self) -> None:
        noted = {"begun": self._begun, "finished": self._finished}
        write_atomic(self._folder / PARTS_FILE, json.dumps(noted, indent=2) + "\n")


def code_identity() -> str:
    """Hash of this package's files, of the evaluation tasks, and of what they build on."""
    digest = hashlib.sha256()
    package = Path(__file__).resolve().parents[1]
    for root in (package, eval_root() / "tasks", eval_root() / "suites"):
        files = (p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
        for path in sorted(files):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return sha256_json([digest.hexdigest(), package_versions(*DEPENDENCIES)])
