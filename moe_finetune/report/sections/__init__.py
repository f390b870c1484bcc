"""The sections of the page, in order.

A section is one file with one ``Section`` and one line here. ``render`` receives the
:class:`~moe_finetune.report.context.Report` and returns markup, or None if the runs have nothing to
show (after ``report.note_missing``).
"""

from moe_finetune.report.context import Report, Section, folded
from moe_finetune.report.markup import Markup, tag
from moe_finetune.report.sections.answer import ANSWER
from moe_finetune.report.sections.curves import CURVES
from moe_finetune.report.sections.reproduce import REPRODUCE
from moe_finetune.report.sections.routing import ROUTING
from moe_finetune.report.sections.scores import SCORES
from moe_finetune.report.sections.settings import ENVIRONMENT, SETTINGS
from moe_finetune.report.sections.specialization import SPECIALIZATION
from moe_finetune.report.sections.strength import STRENGTH


def _missing(report: Report) -> Markup | None:
    """What could not be shown, and what would provide it."""
    if not report.missing:
        return None
    entries = [tag("li", tag("strong", what), f": {remedy}") for what, remedy in report.missing]
    title = f"{len(entries)} not shown, and what would show them"
    return folded(title, tag("ul", entries, class_="missing"))


SECTIONS: list[Section] = [
    ANSWER,
    ROUTING,
    SPECIALIZATION,
    CURVES,
    STRENGTH,
    SCORES,
    SETTINGS,
    ENVIRONMENT,
    REPRODUCE,
    # last: the others leave their notes first
    Section("missing", "Not measured", _missing),
]
