"""The page: one self-contained file, checked for size, written by rename."""

import base64
import hashlib
import logging
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path

from moe_finetune.errors import DataError, DiskSpaceError, OutputExistsError
from moe_finetune.io import output_lock, write_atomic
from moe_finetune.report.context import Report, Section
from moe_finetune.report.markup import Markup, breakable, join, tag
from moe_finetune.report.read_runs import read_runs
from moe_finetune.report.sections import SECTIONS

log = logging.getLogger(__name__)
LARGE = 2_000_000  # bytes


def write_report(
    runs: Iterable[Path | str],
    output: Path | str,
    title: str | None = None,
    labels: Sequence[str] | None = None,
) -> Path:
    """Write one HTML page on the runs that opens without a network; return its path.

    Args:
        runs: run folders, or folders of runs. With two or more, the first is the baseline.
        output: the page's file, which ends in .html, or a folder to put ``index.html`` into; a
            page there is replaced.
        title: the page's heading; made from the runs by default.
        labels: a name for each run; the folder's name by default.
    """
    loaded = read_runs(runs, labels)
    report = Report(loaded, title or _title([run.label for run in loaded]))
    page = render_page(report)
    if len(page.encode()) > LARGE:
        log.warning(
            "the report on %d runs has %.1f MB and may open slowly; give fewer runs",
            len(loaded), len(page.encode()) / 1e6,
        )  # fmt: skip
    return write_page(page, Path(output))


def render_page(report: Report, sections: Sequence[Section] = SECTIONS) -> str:
    """Return the page's HTML. ``sections`` that render to None are omitted, also from the menu."""
    parts = [(section, content) for section in sections if (content := section.render(report))]
    style = Markup(_asset("page.css"))
    script = Markup(_asset("page.js"))
    # only this script may run, and nothing is loaded from elsewhere
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content="moe-finetune"),
        tag("title", report.title),
        tag("link", rel="icon", href="data:,"),
        tag("style", style),
        tag("script", script),
    )
    body = tag(
        "body",
        tag("a", "Skip to the results", href="#main", class_="skip"),
        _header(report),
        tag("div", _menu([section for section, _ in parts]), _main(parts), class_="layout"),
        tag("footer", "Made by moe-finetune from the runs' result files."),
        tag("div", id="tip", role="status", aria_live="polite"),
    )
    document = tag("html", head, body, lang="en")
    return f"<!doctype html>\n{document}\n"


def _title(labels: list[str]) -> str:
    if len(labels) == 1:
        return f"Fine-tuning report: {labels[0]}"
    if len(labels) == 2:
        return f"{labels[1]} against {labels[0]}"
    return f"{len(labels) - 1} runs against {labels[0]}"


def _header(report: Report) -> Markup:
    models = list(dict.fromkeys(run.model for run in report.runs if run.model))
    about = f"Mixture-of-Experts fine-tuning · {', '.join(models)}" if models else None
    toggle = tag(
        "button", "Theme", type="button", id="theme", aria_label="Switch between light and dark"
    )
    eyebrow = tag("p", about or "Mixture-of-Experts fine-tuning", class_="eyebrow")
    return tag("header", eyebrow, toggle, tag("h1", breakable(report.title)))


def _menu(sections: list[Section]) -> Markup:
    links = [tag("li", tag("a", s.title, href=f"#{s.id}")) for s in sections]
    return tag("nav", tag("ul", links), aria_label="Sections")


def _main(parts: Sequence[tuple[Section, Markup]]) -> Markup:
    """The sections; all but the first fold, and on a phone the page's script folds them."""
    first, *others = (
        (section, tag("h2", section.title, id=f"{section.id}-title"), content)
        for section, content in parts
    )
    bodies = [(first[0], join(first[1:]))]
    bodies += [
        (section, tag("details", tag("summary", heading), content, open=True, class_="part"))
        for section, heading, content in others
    ]
    sections = [
        tag("section", body, id=section.id, aria_labelledby=f"{section.id}-title")
        for section, body in bodies
    ]
    return tag("main", sections, id="main", tabindex="-1")


def _asset(name: str) -> str:
    return files("moe_finetune.report").joinpath(name).read_text(encoding="utf-8")


def write_page(page: str, output: Path) -> Path:
    """Write a rendered page to the file, or into the folder, ``output``; return its path."""
    # Without the .html ending a browser shows the source.
    if output.is_dir() or output.suffix.lower() not in (".html", ".htm"):
        output = output / "index.html"
    with output_lock(output, wait=True):
        _replace(page, output)
    return output


def _replace(page: str, output: Path) -> None:
    if output.exists() and 'content="moe-finetune"' not in _start(output):
        raise OutputExistsError(f"{output}: exists and is not a report; choose another --output")
    try:
        write_atomic(output, page)
    except DiskSpaceError:
        raise
    except OSError as error:
        raise DataError(f"{output}: cannot be written: {error.strerror}") from None


def _start(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(4096)
