"""The sections of the page, in order.

A section is one file with one ``Section`` and one line here. ``render`` gets the
:class:`~moe_finetune.report.context.Report` and returns markup, or None when the runs hold nothing
for it (after a note by ``report.lacks``).
"""

from __future__ import annotations

from moe_finetune.report.context import Section
from moe_finetune.report.sections.answer import ANSWER
from moe_finetune.report.sections.curves import CURVES
from moe_finetune.report.sections.environment import ENVIRONMENT
from moe_finetune.report.sections.missing import MISSING
from moe_finetune.report.sections.reproduce import REPRODUCE
from moe_finetune.report.sections.routing import ROUTING
from moe_finetune.report.sections.scores import SCORES
from moe_finetune.report.sections.settings import SETTINGS
from moe_finetune.report.sections.specialization import SPECIALIZATION
from moe_finetune.report.sections.strength import STRENGTH

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
    MISSING,  # last: the others leave their notes first
]
