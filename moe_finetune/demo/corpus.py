"""Real text that every Python installation has, as two domains.

* ``code``: the standard library's source with its docstrings taken out.
* ``prose``: those docstrings, and the language reference that ``help()`` shows (pydoc's topics).

A document belongs to one split for good, by a hash of its name: ``pretrain``, ``finetune`` or
``heldout``. A module's docstrings are in the same split as its source.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import sysconfig
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moe_finetune.errors import DataError

Split = Literal["pretrain", "finetune", "heldout"]
Domain = Literal["code", "prose"]

# Packages read beside the top-level modules.
PACKAGES = (
    "asyncio", "collections", "concurrent", "email", "http", "json", "logging", "unittest",
    "urllib",
)  # fmt: skip
MIN_DOCSTRING = 160
"""Characters below which a docstring is too short to be a document."""


@dataclass(frozen=True)
class Document:
    """A named text of one domain and the split it belongs to."""

    name: str
    domain: Domain
    split: Split
    text: str


def split_of(name: str) -> Split:
    """70 % of names are for pretraining, 15 % for fine-tuning and 15 % held out."""
    bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100
    return "pretrain" if bucket < 70 else "finetune" if bucket < 85 else "heldout"


def read_corpus(library: Path | None = None) -> list[Document]:
    """All documents of both domains, in a fixed order.

    Args:
        library: folder of the standard library; that of the running Python when None.

    Raises:
        DataError: the folder holds no source (a Python installed without it).
    """
    return list(_corpus(library or library_folder()))


@functools.cache  # a demo reads it for each of its parts
def _corpus(root: Path) -> tuple[Document, ...]:
    documents = [document for path in source_files(root) for document in _module(root, path)]
    if not documents:
        raise DataError(
            f"{root}: no standard-library source found, which the demo trains on; use a Python "
            "installation that includes it"
        )
    return (*documents, *_topics())


def library_folder() -> Path:
    """Folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def source_files(root: Path) -> Iterator[Path]:
    """The files that :func:`read_corpus` reads, in its order."""
    yield from sorted(root.glob("*.py"))
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            if "test" not in path.parts:  # many installations leave the tests out
                yield path


def _module(root: Path, path: Path) -> Iterator[Document]:
    name = path.relative_to(root).as_posix()
    source = path.read_text(encoding="utf-8", errors="replace")
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a file for another version of Python
        return
    lines = source.splitlines()
    docstrings = []
    for node in _statements(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        text = ast.get_docstring(node)
        if text is None:
            continue
        expression = node.body[0]
        for index in range(expression.lineno - 1, expression.end_lineno or expression.lineno):
            lines[index] = ""
        if len(text) >= MIN_DOCSTRING:
            docstrings.append(text)
    split = split_of(name)
    code = "\n".join(line.rstrip() for line in lines if line.strip())
    if code:
        yield Document(name, "code", split, code)
    if docstrings:
        yield Document(f"{name}:docstrings", "prose", split, "\n\n".join(docstrings))


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """The tree's statements in the order of ``ast.walk``, which goes through expressions, too."""
    waiting: deque[ast.AST] = deque([tree])
    while waiting:
        node = waiting.popleft()
        yield node
        for name in node._fields:
            body = getattr(node, name, None)
            if isinstance(body, list) and body and isinstance(body[0], _HOLD_STATEMENTS):
                waiting.extend(body)


_HOLD_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


def _topics() -> Iterator[Document]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield Document(f"topic:{name}", "prose", split_of(f"topic:{name}"), topics[name].strip())
