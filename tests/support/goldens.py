"""Recorded answers as JSON, one line a case, so that a diff shows which cases changed."""

import json
from collections.abc import Mapping
from typing import Any


def lines_of(cases: Mapping[str, Any]) -> str:
    """The text of such a file."""
    rows = [
        f"{json.dumps(case, ensure_ascii=False)}: {json.dumps(answer, ensure_ascii=False)}"
        for case, answer in cases.items()
    ]
    return "{\n" + ",\n".join(rows) + "\n}\n"
