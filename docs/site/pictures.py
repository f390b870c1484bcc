"""The small pictures of ``docs/metrics.md`` and ``docs/architecture.md``.

Each metric is drawn on two made-up samples, and the number under a panel is what
:mod:`moe_finetune.metrics` computes for it.
``python docs/site/pictures.py`` (``make tables``) writes ``docs/pictures``; a test checks that
the files are current.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

import numpy as np
import torch

from moe_finetune import metrics
from moe_finetune.losses.erc import erc_from_table
from moe_finetune.losses.functional import coupling_loss
from moe_finetune.losses.gram import gram
from moe_finetune.metrics.arrays import entropy
from moe_finetune.routing.measures_of_model import least_alpha
from moe_finetune.routing.sums import squared_cosine

FOLDER = Path(__file__).resolve().parents[1] / "pictures"
COLORS = ("#0072b2", "#c2500a", "#00805d", "#a8477f")
PANEL, GAP, HEIGHT = 220, 40, 150
STYLE = "font-family='system-ui,sans-serif' font-size='13' fill='#1a212b'"


def text(x: float, y: float, words: str, anchor: str = "middle", size: int = 13) -> str:
    """A line of text."""
    start = f"<text x='{x:g}' y='{y:g}' text-anchor='{anchor}' font-size='{size}'>"
    return f"{start}{escape(words)}</text>"


def rectangle(x: float, y: float, width: float, height: float, color: str) -> str:
    """A filled rectangle."""
    return (
        f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}' fill='{color}'/>"
    )


def arrow(x: float, y: float, to_x: float, to_y: float, color: str = "#5a6573") -> str:
    """A line that ends in a dot."""
    return (
        f"<path d='M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}' stroke='{color}' stroke-width='2.5'/>"
        f"<circle cx='{to_x:.1f}' cy='{to_y:.1f}' r='4' fill='{color}'/>"
    )


def bars(values: np.ndarray, strong: np.ndarray | None = None, top: float | None = None) -> str:
    """Bars from the bottom of a panel; those not ``strong`` are pale."""
    width, top = PANEL / len(values), top or float(values.max())
    chosen = np.ones(len(values), bool) if strong is None else strong
    parts = []
    for i, value in enumerate(values):
        height = HEIGHT * value / top
        color = COLORS[0] if chosen[i] else "#b9cfe0"
        parts.append(rectangle(i * width + 2, HEIGHT - height, width - 4, height, color))
    return "".join(parts)


def cells(values: np.ndarray, top: float = 1.0) -> str:
    """A matrix, darker where a value is larger."""
    rows, columns = values.shape
    width, height = PANEL / columns, HEIGHT / rows
    parts = []
    for (row, column), value in np.ndenumerate(values):
        share = value / top
        color = f"rgb({246 - 210 * share:.0f},{248 - 130 * share:.0f},{250 - 70 * share:.0f})"
        parts.append(rectangle(column * width, row * height, width - 1.5, height - 1.5, color))
    return "".join(parts)


def dots(points_N2: np.ndarray, labels_N: np.ndarray) -> str:
    """Points in the plane, a color for each label."""
    low, spread = points_N2.min(0), np.ptp(points_N2, axis=0)
    at = 6 + (points_N2 - low) / spread * (PANEL - 12, HEIGHT - 12)
    return "".join(
        f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.4' fill='{COLORS[label]}'/>"
        for (x, y), label in zip(at, labels_N, strict=True)
    )


def panels(title: str, *parts: tuple[str, str]) -> str:
    """Drawings side by side, each above its value."""
    width = len(parts) * PANEL + (len(parts) - 1) * GAP + 20
    drawn = "".join(
        f"<g transform='translate({10 + i * (PANEL + GAP)} 10)'>{drawing}"
        f"{text(PANEL / 2, HEIGHT + 20, words)}</g>"
        for i, (drawing, words) in enumerate(parts)
    )
    return picture(title, width, HEIGHT + 42, drawn)


def picture(title: str, width: int, height: int, drawn: str) -> str:
    """A whole SVG file on white."""
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' "
        f"height='{height}' role='img' {STYLE}><title>{escape(title)}</title>"
        f"{rectangle(0, 0, width, height, '#ffffff')}{drawn}</svg>\n"
    )


def max_violation() -> str:
    """Even load, and one busy expert."""
    loads = [np.array([9, 11, 10, 10, 9, 11, 10, 10]), np.array([4, 6, 36, 5, 9, 3, 12, 5])]
    parts = [(bars(load, top=36), f"MaxVio {metrics.max_violation(load):.2f}") for load in loads]
    return panels("Load of eight experts: even, and with one busy expert", *parts)


def expert_overlap() -> str:
    """Tokens in the plane, by expert: mixed, and separate."""
    rng = np.random.default_rng(3)
    labels_N = np.repeat(np.arange(4), 40)
    centers_42 = np.array([(0, 0), (3, 0.4), (0.5, 2.6), (3.4, 3)])
    parts = []
    for pull in (0.25, 1.0):
        points_N2 = pull * centers_42[labels_N] + rng.normal(size=(160, 2)) * 0.55
        value = metrics.expert_overlap(points_N2, labels_N)
        parts.append((dots(points_N2, labels_N), f"expert overlap {value:.2f}"))
    return panels("Tokens colored by expert: neighbors mixed, and neighbors together", *parts)


def scores(sharp: float) -> np.ndarray:
    """Scores of 12 tokens over 6 experts; token t prefers expert t mod 6."""
    logits_TE = sharp * np.eye(6)[np.arange(12) % 6] + 0.2 * np.sin(np.arange(72).reshape(12, 6))
    exp_TE = np.exp(logits_TE)
    return exp_TE / exp_TE.sum(1, keepdims=True)


def score_variance() -> str:
    """Tokens routed alike, and each its own way."""
    parts = [
        (cells(scores(sharp)), f"score variance {metrics.score_variance(scores(sharp)):.3f}")
        for sharp in (0.4, 4.0)
    ]
    return panels("Scores of 12 tokens (rows) over 6 experts: alike, and different", *parts)


def entropies() -> str:
    """Uncertain and even; confident and even; confident and collapsed."""
    collapsed_TE = scores(4.0)
    collapsed_TE[:, :2] += 6.0
    collapsed_TE /= collapsed_TE.sum(1, keepdims=True)
    parts = []
    for scores_TE in (scores(0.4), scores(4.0), collapsed_TE):
        of_all = entropy(scores_TE.mean(0))
        words = f"H(Z|X) {metrics.routing_entropy(scores_TE):.2f}, H(Z) {of_all:.2f}"
        parts.append((cells(scores_TE), words))
    return panels("Scores: uncertain, confident, and collapsed on two experts", *parts)


def activation_cosine() -> str:
    """Two experts' activations for one token, nearly parallel and nearly orthogonal."""
    parts = []
    for degrees in (20.0, 80.0):
        turned = np.deg2rad([8.0, 8.0 + degrees])
        vectors_K2 = np.stack([np.cos(turned), np.sin(turned)], axis=1)
        value = squared_cosine(gram(torch.from_numpy(vectors_K2[None]))).item()
        drawing = "".join(
            arrow(40, 140, 40 + 120 * x, 140 - 120 * y, color)
            for (x, y), color in zip(vectors_K2, COLORS, strict=False)
        )
        parts.append((drawing, f"activation cosine {value:.2f}"))
    return panels("What two experts compute for one token", *parts)


def coupling_mass() -> str:
    """Router probabilities of two adjacent layers, diffuse and concentrated."""
    parts = []
    for sharp in (0.8, 3.0):
        exp = np.exp(
            sharp * np.array([[2, 0.3, 1.7, 0.4, 0.1, 0.6], [0.2, 1.8, 0.5, 0.3, 2.1, 0.4]])
        )
        below, above = exp / exp.sum(1, keepdims=True)
        top = np.argsort(-below)[None, :2]
        value = -coupling_loss(*map(torch.from_numpy, (below[None], top, above[None])), 2).item()
        chosen = np.concatenate([np.isin(np.arange(6), np.argsort(-p)[:2]) for p in (below, above)])
        parts.append((bars(np.concatenate([below, above]), chosen), f"coupling mass {value:.2f}"))
    return panels("Probabilities in a layer (left six) and the next (right six)", *parts)


def erc() -> str:
    """How strongly each router row excites each expert's gate."""
    weak = np.array([[0.9, 0.7, 1.1], [0.8, 1.0, 0.6], [0.5, 1.2, 1.0]])
    parts = []
    for norms_EE in (weak, weak * 0.6 + np.eye(3)):
        loss, least = (
            erc_from_table(torch.from_numpy(norms_EE)),
            least_alpha(torch.from_numpy(norms_EE)),
        )
        words = f"ERC loss {loss:.2f}, least alpha {least:.2f}"
        parts.append((cells(norms_EE, 1.6), words))
    return panels("Activation norm: router row (down) into expert (across)", *parts)


def injection() -> str:
    """A layer, the loss inside it, and the way of the gradients."""
    boxes = [(20, "router"), (170, "top-k experts"), (350, "sum"), (480, "output y")]
    drawn = "".join(
        f"<rect x='{x}' y='60' width='110' height='44' rx='8' fill='#eaf2f8' stroke='#0072b2'/>"
        + text(x + 55, 87, words)
        for x, words in boxes
    )
    drawn += "".join(
        arrow(x, 82, to, 82) for x, to in ((130, 166), (280, 346), (460, 476), (590, 646))
    )
    drawn += text(648, 66, "next layer", "end")
    drawn += (
        "<rect x='170' y='160' width='110' height='44' rx='8' fill='#fdeee4' stroke='#c2500a'/>"
    )
    drawn += text(225, 187, "layer loss L")
    drawn += arrow(75, 104, 166, 178) + arrow(225, 104, 225, 158)
    drawn += arrow(284, 182, 535, 106, COLORS[1])
    drawn += text(420, 185, "inject: y unchanged,", "start") + text(
        420, 203, "backward adds scale · ∂L", "start"
    )
    drawn += text(330, 34, "forward: the model's own computation", size=14)
    return picture("The loss is computed inside the layer and joins its gradient", 660, 222, drawn)


PICTURES = {
    drawing.__name__: drawing
    for drawing in (
        max_violation, expert_overlap, score_variance, entropies, activation_cosine, coupling_mass,
        erc, injection,
    )
}  # fmt: skip


def files() -> Iterator[tuple[Path, str]]:
    """Path and content of every picture."""
    for name, drawing in PICTURES.items():
        yield FOLDER / f"{name}.svg", drawing()


def main() -> None:
    """Write all pictures."""
    FOLDER.mkdir(exist_ok=True)
    for path, content in files():
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
