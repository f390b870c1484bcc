"""What could not be shown, and what would bring it."""

from __future__ import annotations

from moe_finetune.report.context import Report, Section
from moe_finetune.report.markup import Markup, tag


def _render(report: Report) -> Markup | None:
    if not report.missing:
        return None
    entries = [tag("li", tag("strong", what), f": {remedy}") for what, remedy in report.missing]
    return tag("ul", entries, class_="missing")


MISSING = Section("missing", "What is not here", _render)
