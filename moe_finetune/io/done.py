"""Notes of finished products: written last, with the hash of the product's inputs."""

import json
from pathlib import Path
from typing import Any

from moe_finetune.errors import MoeFinetuneError, RecipeError
from moe_finetune.io.atomic import write_atomic
from moe_finetune.io.json_file import read_object


class DoneNote:
    """A file that records that a product is complete, and the hash of its inputs.

    Args:
        path: the file.
        error, remedy: the exception for a file that cannot be read, and the end of its message.
    """

    def __init__(
        self,
        path: Path,
        error: type[MoeFinetuneError] = RecipeError,
        remedy: str = "delete it to redo the step",
    ):
        self.path, self.error, self.remedy = path, error, remedy

    @property
    def written(self) -> bool:
        return self.path.is_file()

    def read(self) -> dict[str, Any]:
        """The note's content; empty if there is none."""
        return read_object(self.path, self.error, self.remedy) if self.written else {}

    def is_of(self, key: str) -> bool:
        """Return whether the product was finished from the inputs whose hash is ``key``."""
        return self.read().get("inputs") == key

    def write(self, key: str, **details: Any) -> None:
        note = {"inputs": key, **details}
        write_atomic(self.path, json.dumps(note, indent=1, default=str) + "\n")

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
