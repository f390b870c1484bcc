"""The Markdown files of the repository, their fenced blocks, commands, headings and links; and the
scripts that write parts of them.
"""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)")
# A command may name the folder that the page before it has made, so the first pages come first.
FIRST = ("README.md", "docs/first-run.md", "eval/README.md", "docs/evaluation.md")


def pages() -> list[Path]:
    """All pages, in the order in which their commands are run."""
    found = {ROOT / name: None for name in FIRST}
    found |= dict.fromkeys(sorted(ROOT.glob("docs/**/*.md")))
    for pattern in ("recipes/**/*.md", ".github/*.md"):
        found |= dict.fromkeys(sorted(ROOT.glob(pattern)))
    return [*found, ROOT / "eval/bench/README.md", ROOT / "CHANGELOG.md"]


@dataclass(frozen=True)
class Block:
    """A fenced block; ``language`` is empty for commands."""

    page: str
    language: str
    text: str

    def commands(self) -> Iterator[list[str]]:
        """Its commands as lists of words, without comments."""
        for line in self.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words


def blocks() -> list[Block]:
    """Every fenced block of every page."""
    return [
        Block(page.relative_to(ROOT).as_posix(), *found)
        for page in pages()
        for found in FENCE.findall(page.read_text(encoding="utf-8"))
    ]


def anchors(page: Path) -> set[str]:
    """Names that a link may end in: the headings' words with hyphens."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def script(name: str):
    """A script of ``docs/site``, imported."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "site" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
