"""The commands that reproduce these results."""

import base64
import shlex

import yaml

from moe_finetune.report.context import Report, Section
from moe_finetune.report.markup import Markup, join, tag
from moe_finetune.report.read_runs import Run
from moe_finetune.report.sections.settings import without_secrets


def _render(report: Report) -> Markup:
    parts: list[Markup] = [_run(report, run) for run in report.runs]
    paths = " ".join(shlex.quote(str(run.path)) for run in report.runs)
    parts.append(_command("This page", f"moe-finetune report {paths} --output report.html"))
    return join(parts)


def _run(report: Report, run: Run) -> Markup:
    recorded = run.summary.get("command") or run.environment.get("command")
    if isinstance(recorded, list):
        recorded = shlex.join(map(str, recorded))
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in run.label)
    command = recorded or f"moe-finetune train {name}.yaml --output runs/{name}"
    recipe = None
    if run.recipe:
        text = yaml.safe_dump(without_secrets(run.recipe), sort_keys=False, allow_unicode=True)
        data = base64.b64encode(text.encode()).decode()
        recipe = tag(
            "details",
            tag("summary", "Resolved recipe"),
            tag("p", tag("a", f"Save as {name}.yaml", href=f"data:text/yaml;base64,{data}",
                         download=f"{name}.yaml")),
            tag("pre", tag("code", text), tabindex="0"),
        )  # fmt: skip
    return tag("div", _command(report.swatch(run), str(recorded or command)), recipe, _served(run))


def _served(run: Run) -> Markup | None:
    """The last check of what a server answers, in a sentence; None without one."""
    verdict, model, date = (run.served.get(key) for key in ("verdict", "model", "date"))
    if not verdict:
        return None
    return tag("p", f"Served as '{model}', {str(date)[:10]}: {verdict} (served.json).")


def _command(title: str | Markup, command: str) -> Markup:
    copy = tag("button", "Copy", type="button", class_="copy")
    head = tag("div", tag("h3", title), copy, class_="command-head")
    return tag("div", head, tag("pre", tag("code", command), tabindex="0"), class_="command")


REPRODUCE = Section("reproduce", "How to reproduce", _render)
