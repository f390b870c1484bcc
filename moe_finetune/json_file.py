"""A JSON file that holds one object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moe_finetune.errors import MoeFinetuneError


def read_object(file: Path, refused: type[MoeFinetuneError], remedy: str) -> dict[str, Any]:
    """The object in ``file``.

    Raises:
        refused: it cannot be read or holds something else; the message ends with ``remedy``.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as problem:
        raise refused(f"{file}: cannot be read ({problem.strerror}); {remedy}") from None
    except json.JSONDecodeError as problem:
        raise refused(f"{file}:{problem.lineno}: not JSON ({problem.msg}); {remedy}") from None
    except UnicodeDecodeError as problem:
        raise refused(f"{file}: not UTF-8 at byte {problem.start}; {remedy}") from None
    if not isinstance(value, dict):
        raise refused(f"{file}: holds {type(value).__name__} instead of an object; {remedy}")
    return value
