"""Text colored by the experts of its tokens, and the same as a searchable table."""

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from moe_finetune.report.charts.frame import nth_color
from moe_finetune.report.context import Cell, Report, Snapshot, figure, group, listed, table
from moe_finetune.report.markup import DASH, Markup, join, number, tag
from moe_finetune.report.routing_snapshots import reading
from moe_finetune.report.sections.panels import panel

TOKENS = 600  # of colored text per snapshot
COLORED = 6
Texts = list[dict[str, Any]]


def text(report: Report, shots: list[Snapshot]) -> Markup | None:
    """Return the passages, how often a repeated token gets the same expert, and the table."""
    texts_of = [
        (s, s.routing.data["colored_text"]) for s in shots if s.routing.data.get("colored_text")
    ]
    if not texts_of:
        report.note_missing("Text by chosen expert", "the snapshots have no 'colored_text'")
        return None
    named: list[int] = []
    parts, consistency = [], []
    for shot, texts in texts_of:
        with reading(shot.routing.path, "colored_text"):
            pairs = list(_tokens(texts))
        consistency.append(
            100 * token_consistency([t for t, _, _ in pairs], [e for _, e, _ in pairs])
        )
        named = named or largest_groups([e for _, e, _ in pairs], COLORED)
        parts.append(panel(shot, colored(texts, named)))
    layers = {passage.get("layer") for _, texts in texts_of for passage in texts} - {None}
    where = f" in layer {layers.pop()}" if len(layers) == 1 else ""
    content = figure(
        f"How many repeated tokens go to their usual expert{where}, in %: "
        f"{listed([shot for shot, _ in texts_of], consistency, 2)}",
        color_key(named),
        tag("div", parts, class_="panels broad"),
        note="Tokens have the color of their first expert. Does each expert keep to certain words?",
        wide=True,
    )
    return group("Text", content, _token_table(texts_of, where))


def token_consistency(tokens: Sequence[Hashable], experts: Sequence[int]) -> float:
    """Share of repeated tokens that go to the most frequent expert of their token.

    ``tokens`` and ``experts`` have one entry per position of a text. 1 if the token alone
    determines the expert; NaN if no token is repeated.
    """
    counts: dict[Hashable, Counter[int]] = {}
    for token, expert in zip(tokens, experts, strict=True):
        counts.setdefault(token, Counter())[expert] += 1
    repeated = [count for count in counts.values() if count.total() > 1]
    total = sum(count.total() for count in repeated)
    return sum(max(count.values()) for count in repeated) / total if total else math.nan


def largest_groups(groups: Sequence[int], count: int) -> list[int]:
    """Return the most frequent groups, the most frequent first; ties by number."""
    ordered = sorted(Counter(groups).items(), key=lambda item: (-item[1], item[0]))
    return [group for group, _ in ordered[:count]]


def _tokens(texts: Texts) -> Iterator[tuple[str, int, list[int]]]:
    for passage in texts:
        experts = passage["experts"]
        selected = passage.get("selected") or [[e] for e in experts]
        for token, first, selection in zip(passage["tokens"], experts, selected, strict=False):
            yield str(token), first, selection


def color_key(named: Sequence[int]) -> Markup:
    """Return the legend of the colors in :func:`colored`."""
    entries = [
        tag("li", tag("mark", f"expert {e}", style=f"--c:{nth_color(rank)}"))
        for rank, e in enumerate(named)
    ]
    return tag("ul", [*entries, tag("li", "others: no color")], class_="key")


def colored(texts: Texts, named: Sequence[int]) -> Markup:
    """Return the passages' tokens in the colors of their ``experts`` that are ``named``."""
    paragraphs, remaining = [], TOKENS
    for passage in texts:
        pairs = list(zip(passage["tokens"], passage["experts"], strict=False))[:remaining]
        remaining -= len(pairs)
        spans = [
            tag("mark", token, style=f"--c:{nth_color(named.index(e))}", data_tip=f"expert {e}")
            if e in named
            else tag("span", token, data_tip=f"expert {e}")
            for token, e in pairs
        ]
        if spans:
            paragraphs.append(tag("p", spans, class_="passage"))
    return join(paragraphs)


def _token_table(texts_of: Sequence[tuple[Snapshot, Texts]], where: str) -> Markup:
    """Every token with its experts in each snapshot; the page's script filters the table."""
    experts_of: dict[str, list[Counter[int]]] = {}
    times: Counter[str] = Counter()
    for index, (_, texts) in enumerate(texts_of):
        for token, _, experts in _tokens(texts):
            experts_of.setdefault(token, [Counter() for _ in texts_of])[index].update(experts)
            times[token] += index == 0
    ordered = sorted(experts_of, key=lambda token: (-times[token], token))
    rows: list[list[Cell]] = []
    keys: list[list[float | str | None]] = []
    for token in ordered:
        visible = token.replace("\n", "↵").replace(" ", "␣")
        cells = [
            ", ".join(f"{e} ({n})" if n > 1 else str(e) for e, n in counts.most_common()) or DASH
            for counts in experts_of[token]
        ]
        rows.append([tag("code", visible), number(times[token]), *cells])
        firsts = [
            max(counts, key=lambda e: counts[e], default=None) for counts in experts_of[token]
        ]
        keys.append([token, times[token], *firsts])
    columns: list[Cell] = ["Token", "Times", *(shot.name for shot, _ in texts_of)]
    caption = f"Tokens and the experts that took them{where}; in brackets: how often"
    numbers = sorted({e for counts in experts_of.values() for count in counts for e in count})
    options = [tag("option", f"expert {e}", value=str(e)) for e in numbers]
    search = tag("input", type="search", placeholder="part of a token", class_="filter-text")
    fields = [
        tag("label", "Token ", search),
        tag(
            "label",
            "Expert ",
            tag(
                "select", tag("option", "every expert", value=""), *options, class_="filter-expert"
            ),
        ),
        tag("output", f"{len(rows)} of {len(rows)} tokens"),
    ]
    grid = table(caption, columns, rows, sortable=True, keys=keys)
    return tag("div", tag("div", fields, class_="filters"), grid, class_="filtered")
