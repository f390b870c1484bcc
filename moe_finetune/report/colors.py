"""Colours of the page: maps that are even to the eye, and a palette safe for colour blindness.

The maps are computed in OKLCH (Ottosson 2020, https://bottosson.github.io/posts/oklab/), where
equal steps of lightness look equal, so that a heat map does not invent edges.
"""

from __future__ import annotations

import math

Rgb = tuple[int, int, int]
Rgba = tuple[int, int, int, int]

LEVELS = 256


def oklch(lightness: float, chroma: float, hue: float) -> Rgb:
    """Return the sRGB colour nearest to an OKLCH one (chroma is lowered until it can be shown)."""
    while True:
        linear = _linear_rgb(lightness, chroma, math.radians(hue))
        if all(-1e-4 <= c <= 1.0001 for c in linear) or chroma < 1e-3:
            break
        chroma *= 0.97
    red, green, blue = (round(255 * _gamma(min(1.0, max(0.0, c)))) for c in linear)
    return red, green, blue


def _linear_rgb(lightness: float, chroma: float, hue: float) -> tuple[float, float, float]:
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )


def _gamma(linear: float) -> float:
    return 12.92 * linear if linear <= 0.0031308 else 1.055 * linear ** (1 / 2.4) - 0.055


def sequential(steps: int = LEVELS) -> list[Rgba]:
    """Return the map for amounts: dark violet (little) over teal to yellow (much)."""
    colors: list[Rgba] = []
    for step in range(steps):
        t = step / (steps - 1)
        # hue falls slowly through the blues and quickly through the greens
        hue = 300 - 195 * t**1.15
        colors.append((*oklch(0.27 + 0.65 * t, 0.13 + 0.03 * t, hue), 255))
    return colors


def diverging(steps: int = LEVELS) -> list[Rgba]:
    """Return the map for differences: blue (less), the page's own ground (equal), orange (more).

    The middle is transparent, so that "no difference" is the ground in light and in dark.
    """
    blue, orange = oklch(0.56, 0.17, 255), oklch(0.68, 0.18, 50)
    colors: list[Rgba] = []
    for step in range(steps):
        t = 2 * step / (steps - 1) - 1
        colors.append((*(blue if t < 0 else orange), round(255 * abs(t))))
    return colors


def gradient(colors: list[Rgba], stops: int = 9) -> str:
    """Return a CSS gradient through ``stops`` of the colours, from left to right."""
    picked = (colors[round(i * (len(colors) - 1) / (stops - 1))] for i in range(stops))
    text = ", ".join(f"rgb({r} {g} {b} / {a / 255:.2f})" for r, g, b, a in picked)
    return f"linear-gradient(to right, {text})"


# Okabe & Ito's palette (2008), lightened for the dark ground where it would sink.
# The first is the baseline: grey, behind the others.
RUNS: list[tuple[str, str]] = [
    ("#6b7280", "#9aa3af"),
    ("#0072b2", "#4db1ec"),
    ("#c2500a", "#f28a4b"),
    ("#00805d", "#2fc59b"),
    ("#a8477f", "#e59cc4"),
    ("#8a6a00", "#e6c04a"),
    ("#5b4bb5", "#a99bf5"),
]


def css_variables() -> str:
    """Return the colours that the stylesheet and the pictures refer to."""
    lines = [f"--run-{i}: light-dark({light}, {dark});" for i, (light, dark) in enumerate(RUNS)]
    lines.append(f"--sequential: {gradient(sequential())};")
    lines.append(f"--diverging: {gradient(diverging())};")
    return ":root{" + "".join(lines) + "}"
