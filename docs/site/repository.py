"""Shows the repository's other Markdown files on the site, and what its pages link to.

A page of ``docs/`` links to ``../recipes/README.md`` as the repository has it. On the site such a
file is under ``repository/``, and links are rewritten accordingly; a link to something that does
not exist stays unchanged, and stops the strict build.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SHOWN = "repository"
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")


def pages() -> list[Path]:
    """Markdown files outside ``docs/`` that the site shows."""
    found = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "eval" / "README.md"]
    return [
        *found,
        *sorted(ROOT.glob("eval/bench/README.md")),
        *sorted(ROOT.glob("recipes/**/*.md")),
        *sorted(ROOT.glob(".github/*.md")),
    ]


def place(file: Path) -> str:
    """Path of ``file`` on the site."""
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS).as_posix()
    name = file.relative_to(ROOT).as_posix()
    # A README would become the index of its folder and hide the site's; dot folders are left out.
    return f"{SHOWN}/{name.replace('README.md', 'readme.md').removeprefix('.github/')}"


def linked(file: Path) -> dict[str, Path]:
    """Link as written -> the file of the repository that it means, where there is one."""
    found = {}
    for name, _ in LINK.findall(file.read_text(encoding="utf-8")):
        target = Path(os.path.normpath(file.parent / name))
        if target.is_file() and target.is_relative_to(ROOT):
            found[name] = target
    return found


def shown() -> list[Path]:
    """The site's files: its pages, and whatever is reached from them by links."""
    found = dict.fromkeys([*pages(), *sorted(DOCS.rglob("*.md"))])
    waiting = list(found)
    while waiting:
        file = waiting.pop()
        if file.suffix == ".md":
            new = [target for target in linked(file).values() if target not in found]
            found |= dict.fromkeys(new)
            waiting += new
    return list(found)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside ``docs/`` and every file that they, or a page so added, link to."""
    for file in shown():
        if not file.is_relative_to(DOCS):
            files.append(File.generated(config, place(file), abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links at the places where the site has the files."""
    source = Path(page.file.abs_src_path)
    here = os.path.dirname(place(source))
    known = linked(source)

    def moved(match: re.Match[str]) -> str:
        name, anchor = match[1], match[2] or ""
        if name not in known:
            return match[0]
        return os.path.relpath(place(known[name]), here or ".") + anchor

    return spaced(LINK.sub(moved, markdown))


def spaced(markdown: str) -> str:
    """An empty line before each list and table, which Python-Markdown needs and GitHub does not."""
    lines: list[str] = []
    in_fence = False
    for line in markdown.splitlines():
        opens = re.match(r"(- |1\. |\|)", line)
        previous = lines[-1] if lines else ""
        if not in_fence and opens and previous and not re.match(r"(- |\d+\. |\||\s)", previous):
            lines.append("")
        in_fence ^= line.lstrip().startswith("```")
        lines.append(line)
    return "\n".join(lines) + "\n"
