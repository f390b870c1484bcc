import json

import pytest

from tests.support import tiny


@pytest.fixture
def tokenizer():
    return tiny.tokenizer()


@pytest.fixture
def write(tmp_path):
    def write(name: str, rows: list) -> str:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(tmp_path / name)

    return write
