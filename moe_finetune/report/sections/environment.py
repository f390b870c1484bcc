"""Versions, hardware and times, and what evaluated the runs."""

from __future__ import annotations

from moe_finetune.report.context import Report, Section, group
from moe_finetune.report.markup import Markup, join
from moe_finetune.report.sections.settings import side_by_side


def _render(report: Report) -> Markup | None:
    parts = []
    if any(run.environment for run in report.runs):
        sources = [run.environment for run in report.runs]
        parts.append(side_by_side(report, "Versions, hardware and times", sources))
    else:
        report.lacks("Environment", "no environment.json in the run's folder")
    if any(run.evaluation for run in report.runs):
        # remarks and unfinished tasks stand beside the scores
        sources = [
            {k: v for k, v in run.evaluation.items() if k not in ("notes", "unfinished")}
            for run in report.runs
        ]
        grid = side_by_side(report, "How the runs were evaluated", sources)
        parts.append(group("Evaluation", grid))
    return join(parts) if parts else None


ENVIRONMENT = Section("environment", "Environment", _render)
