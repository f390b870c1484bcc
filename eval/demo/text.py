"""Real text that every Python installation has, as two domains.

* ``code``: the standard library's source with its docstrings taken out.
* ``prose``: those docstrings, and the language reference that ``help()`` shows (pydoc's topics).

A document belongs to one split for good, by a hash of its name: ``pretrain``, ``finetune`` or
``heldout``. A module's docstrings are in the same split as its source.
"""

import ast
import functools
import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Split = Literal["pretrain", "finetune", "heldout"]
Domain = Literal["code", "prose"]

# Packages read in addition to the top-level modules.
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


@functools.cache
def read_documents(library: Path | None = None) -> tuple[Document, ...]:
    """All documents, in a fixed order; ``library`` replaces the running Python's own."""
    root = library or Path(sysconfig.get_paths()["stdlib"])
    documents = [document for path in _source_files(root) for document in _module(root, path)]
    if not documents:
        raise SystemExit(f"{root}: no standard-library source; use a Python that includes it")
    return (*documents, *_topics())


def _source_files(root: Path) -> Iterator[Path]:
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
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
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


def _topics() -> Iterator[Document]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield Document(f"topic:{name}", "prose", split_of(f"topic:{name}"), topics[name].strip())
