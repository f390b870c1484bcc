"""Writes ``llms.txt`` into the built site: every page with its first sentence, for language models.

See https://llmstxt.org. The order is the navigation's.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
NO_PROSE = r"$|\s|#|\||!\[|<|[-*] |\d+\. "
"""How headings, tables, pictures, comments and lists begin; or an empty line."""
SUMMARY = "Fine-tune Mixture-of-Experts language models with LoRA on experts and routers."


def on_post_build(config: Any) -> None:
    """Write the file next to the site's pages."""
    file = Path(config["site_dir"]) / "llms.txt"
    file.write_text(text(config["nav"]), encoding="utf-8")


def text(nav: list[Any]) -> str:
    """The file's text; ``nav`` is the navigation of ``mkdocs.yml``."""
    lines = ["# moe-finetune", "", f"> {SUMMARY}", ""]
    for title, pages in sections(nav):
        lines += [f"## {title}", *(line(page) for page in pages), ""]
    return "\n".join(lines)


def sections(nav: list[Any]) -> Iterator[tuple[str, list[str]]]:
    """The groups of pages below ``docs/``, by title."""
    yield "Overview", [entry for entry in nav if isinstance(entry, str)]
    for entry in nav:
        if isinstance(entry, dict):
            for title, pages in entry.items():
                if inside := [page for page in pages if (DOCS / str(page)).is_file()]:
                    yield title, inside


def line(page: str) -> str:
    """A page's title, address and first sentence."""
    text = re.sub(r"(?ms)^```.*?^```$", "", (DOCS / page).read_text(encoding="utf-8"))
    title, *lines = text.splitlines()
    paragraphs = itertools.groupby(lines, key=lambda words: re.match(NO_PROSE, words) is None)
    prose = (" ".join(words) for is_prose, words in paragraphs if is_prose)
    sentences = re.split(r"(?<=[.:!?])\s+(?=[A-Z`*[])", next(prose, ""))
    plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", sentences[0])
    return f"- [{title.lstrip('# ')}]({page.removesuffix('.md')}.html){plain and ': ' + plain}"
