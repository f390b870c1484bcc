"""Text in the colours of the experts that its tokens were sent to."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from moe_finetune.errors import TraceError
from moe_finetune.report.charts.scatter import group_color, largest_groups
from moe_finetune.report.context import Report, Snapshot, figure, group, listed, table
from moe_finetune.report.markup import DASH, Markup, join, number, tag
from moe_finetune.report.sections.panels import panel

TOKENS = 600  # of coloured text per snapshot
COLORED = 6


def text(report: Report, shots: list[Snapshot]) -> Markup | None:
    """Return the passages, and how often a repeated token meets the same expert."""
    known = [
        (s, s.routing.data["colored_text"]) for s in shots if s.routing.data.get("colored_text")
    ]
    if not known:
        report.lacks("Text by chosen expert", "the snapshots hold no 'colored_text'")
        return None
    named: list[int] = []
    parts, kept = [], []
    for shot, texts in known:
        _check(shot, texts)
        kept.append(100 * consistency(texts))
        experts = [e for passage in texts for e in passage["experts"]]
        named = named or largest_groups(experts, COLORED)
        parts.append(panel(shot, join([_passages(texts, named), _favourites(texts, shot)])))
    layers = {passage.get("layer") for _, texts in known for passage in texts} - {None}
    where = f" in layer {layers.pop()}" if len(layers) == 1 else ""
    legend_entries = [
        tag("li", tag("mark", f"expert {e}", style=f"--c:{group_color(rank)}"))
        for rank, e in enumerate(named)
    ]
    content = figure(
        f"Repeated tokens that go to their usual expert{where}, in %: "
        f"{listed([shot for shot, _ in known], kept, 2)}",
        tag("ul", [*legend_entries, tag("li", "others: no colour")], class_="key"),
        tag("div", parts, class_="panels broad"),
        note="Tokens have the colour of their first expert. Does it keep to kinds of words?",
        wide=True,
    )
    return group("Text", content)


def _passages(texts: list[dict[str, Any]], named: list[int]) -> Markup:
    shown, left = [], TOKENS
    for passage in texts:
        pairs = list(zip(passage["tokens"], passage["experts"], strict=False))[:left]
        left -= len(pairs)
        spans = [
            tag("mark", token, style=f"--c:{group_color(named.index(e))}", data_tip=f"expert {e}")
            if e in named
            else tag("span", token, data_tip=f"expert {e}")
            for token, e in pairs
        ]
        if spans:
            shown.append(tag("p", spans, class_="passage"))
    return join(shown)


def _favourites(texts: list[dict[str, Any]], shot: Snapshot) -> Markup:
    """The most frequent tokens of each expert: the same picture for those who cannot see colour."""
    tokens: dict[int, Counter[str]] = {}
    for passage in texts:
        for token, e in zip(passage["tokens"], passage["experts"], strict=False):
            if str(token).strip():
                tokens.setdefault(e, Counter())[str(token).strip()] += 1
    ordered = sorted(tokens.items(), key=lambda item: -sum(item[1].values()))
    rows: list[list[object]] = [
        [f"expert {e}", number(sum(count.values())), ", ".join(t for t, _ in count.most_common(8))]
        for e, count in ordered
    ]
    columns: list[object] = ["Expert", "Tokens", "Most frequent"]
    grid = table(f"Tokens of each expert: {shot.label}", columns, rows or [[DASH, DASH, DASH]])
    return tag("details", tag("summary", "Tokens of each expert"), grid)


def _check(shot: Snapshot, texts: Any) -> None:
    for passage in texts:
        if not isinstance(passage, dict) or not {"tokens", "experts"} <= set(passage):
            raise TraceError(
                f"{shot.routing.path}: 'colored_text' must be a list of objects with 'tokens' and "
                "'experts'"
            )


def consistency(texts: list[dict[str, Any]]) -> float:
    """Return how often a token that occurs more than once goes to its most frequent expert.

    1 when the token alone decides; NaN when no token is repeated.
    """
    experts: dict[str, Counter[int]] = {}
    for passage in texts:
        for token, e in zip(passage["tokens"], passage["experts"], strict=False):
            experts.setdefault(str(token), Counter())[e] += 1
    repeated = [count for count in experts.values() if sum(count.values()) > 1]
    total = sum(sum(count.values()) for count in repeated)
    return sum(max(count.values()) for count in repeated) / total if total else math.nan
