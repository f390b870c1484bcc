"""Text in the colours of the experts that took its tokens, and the same as a table to search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from moe_finetune.errors import TraceError
from moe_finetune.metrics.tokens import token_consistency
from moe_finetune.report.charts.frame import nth_color
from moe_finetune.report.charts.scatter import largest_groups
from moe_finetune.report.context import Report, Snapshot, figure, group, listed, table
from moe_finetune.report.markup import DASH, Markup, join, number, tag
from moe_finetune.report.sections.panels import panel

TOKENS = 600  # of coloured text per snapshot
COLORED = 6
Texts = list[dict[str, Any]]


def text(report: Report, shots: list[Snapshot]) -> Markup | None:
    """Return the passages, how often a repeated token meets the same expert, and the table."""
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
        pairs = list(_tokens(texts))
        kept.append(100 * token_consistency([t for t, _, _ in pairs], [e for _, e, _ in pairs]))
        named = named or largest_groups([e for _, e, _ in pairs], COLORED)
        parts.append(panel(shot, coloured(texts, named)))
    layers = {passage.get("layer") for _, texts in known for passage in texts} - {None}
    where = f" in layer {layers.pop()}" if len(layers) == 1 else ""
    content = figure(
        f"How many repeated tokens go to their usual expert{where}, in %: "
        f"{listed([shot for shot, _ in known], kept, 2)}",
        color_key(named),
        tag("div", parts, class_="panels broad"),
        note="Tokens have the colour of their first expert. Does it keep to kinds of words?",
        wide=True,
    )
    return group("Text", content, _token_table(known, where))


def _tokens(texts: Texts) -> Iterator[tuple[str, int, list[int]]]:
    for passage in texts:
        experts = passage["experts"]
        selected = passage.get("selected") or [[e] for e in experts]
        for token, first, taken in zip(passage["tokens"], experts, selected, strict=False):
            yield str(token), first, taken


def color_key(named: Sequence[int]) -> Markup:
    """Return which experts the colours of :func:`coloured` stand for."""
    entries = [
        tag("li", tag("mark", f"expert {e}", style=f"--c:{nth_color(rank)}"))
        for rank, e in enumerate(named)
    ]
    return tag("ul", [*entries, tag("li", "others: no colour")], class_="key")


def coloured(texts: Texts, named: Sequence[int]) -> Markup:
    """Return the passages' tokens in the colours of their ``experts`` that are ``named``."""
    shown, left = [], TOKENS
    for passage in texts:
        pairs = list(zip(passage["tokens"], passage["experts"], strict=False))[:left]
        left -= len(pairs)
        spans = [
            tag("mark", token, style=f"--c:{nth_color(named.index(e))}", data_tip=f"expert {e}")
            if e in named
            else tag("span", token, data_tip=f"expert {e}")
            for token, e in pairs
        ]
        if spans:
            shown.append(tag("p", spans, class_="passage"))
    return join(shown)


def _token_table(known: Sequence[tuple[Snapshot, Texts]], where: str) -> Markup:
    """Every token with the experts that took it in each snapshot; the page's script filters it."""
    taken: dict[str, list[Counter[int]]] = {}
    times: Counter[str] = Counter()
    for place, (_, texts) in enumerate(known):
        for token, _, experts in _tokens(texts):
            taken.setdefault(token, [Counter() for _ in known])[place].update(experts)
            times[token] += place == 0
    ordered = sorted(taken, key=lambda token: (-times[token], token))
    rows: list[list[object]] = []
    keys: list[list[float | str | None]] = []
    for token in ordered:
        shown = token.replace("\n", "↵").replace(" ", "␣")
        cells = [
            ", ".join(f"{e} ({n})" if n > 1 else str(e) for e, n in counts.most_common()) or DASH
            for counts in taken[token]
        ]
        rows.append([tag("code", shown), number(times[token]), *cells])
        firsts = [max(counts, key=lambda e: counts[e], default=None) for counts in taken[token]]
        keys.append([token, times[token], *firsts])
    columns: list[object] = ["Token", "Times", *(shot.name for shot, _ in known)]
    caption = f"Tokens and the experts that took them{where}; in brackets: how often"
    numbers = sorted({e for counts in taken.values() for count in counts for e in count})
    options = [tag("option", f"expert {e}", value=str(e)) for e in numbers]
    every = tag("option", "every expert", value="")
    search = tag("input", type="search", placeholder="part of a token", class_="filter-text")
    fields = [
        tag("label", "Token ", search),
        tag("label", "Expert ", tag("select", every, *options, class_="filter-expert")),
        tag("output", f"{len(rows)} of {len(rows)} tokens"),
    ]
    grid = table(caption, columns, rows, sortable=True, keys=keys)
    return tag("div", tag("div", fields, class_="filters"), grid, class_="filtered")


def _check(shot: Snapshot, texts: Any) -> None:
    for passage in texts:
        if not isinstance(passage, dict) or not {"tokens", "experts"} <= set(passage):
            raise TraceError(
                f"{shot.routing.path}: 'colored_text' must be a list of objects with 'tokens' and "
                "'experts'"
            )
