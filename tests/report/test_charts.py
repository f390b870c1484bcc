"""Scales, lines, heat maps and scatters."""

from __future__ import annotations

import base64
import html
import io
import json
import math
import re

import numpy as np
import pytest
from PIL import Image

from moe_finetune.report.charts.frame import Scale, tick_text
from moe_finetune.report.charts.heatmap import heat_map, shared_limits
from moe_finetune.report.charts.lines import KEPT, Series, _thin, line_chart, moving_mean
from moe_finetune.report.charts.scatter import largest_groups
from moe_finetune.report.colors import sequential
from moe_finetune.report.markup import duration, number
from moe_finetune.report.sections.points import separation
from moe_finetune.report.sections.text import consistency


@pytest.mark.parametrize(
    "values", [[0.3, 17.2], [-0.0298, -0.02], [5.0], [1e-9, 3e-9], [0.0, 0.0], [], [1e8, 3e8]]
)
def test_scale_covers_the_values_with_round_ticks(values):
    scale = Scale.around([*values, math.nan])
    for value in values:
        assert scale.low <= value <= scale.high
    gaps = np.diff(scale.ticks)
    assert gaps == pytest.approx(np.full(len(gaps), gaps[0]))
    mantissa = gaps[0] / 10 ** math.floor(math.log10(gaps[0]) + 1e-9)
    assert any(mantissa == pytest.approx(m) for m in (1, 2, 2.5, 5))
    assert len({tick_text(t, scale.ticks) for t in scale.ticks}) == len(scale.ticks)


@pytest.mark.parametrize(("low", "high"), [(0, 2), (1, 17), (5, 3000), (3, 3), (0, 26)])
def test_ticks_of_steps_and_layers_are_whole(low, high):
    scale = Scale.exact(low, high)
    assert (scale.low, scale.high) == (low, max(high, low + 1))
    assert 2 <= len(scale.ticks) <= 6
    assert all(tick == int(tick) and scale.low <= tick <= scale.high for tick in scale.ticks)


def test_moving_mean_equals_a_slow_loop():
    rng = np.random.default_rng(0)
    values = rng.normal(size=83).tolist()
    values[7] = math.nan
    got = moving_mean(values, 9)
    for i, value in enumerate(values):
        if math.isnan(value):
            assert math.isnan(got[i])
            continue
        near = [values[j] for j in range(83) if abs(i - j) <= 4 and not math.isnan(values[j])]
        assert got[i] == pytest.approx(sum(near) / len(near))


def test_thinning_keeps_ends_and_extremes_in_order():
    rng = np.random.default_rng(1)
    x, y = np.arange(5003.0).tolist(), rng.normal(size=5003).tolist()
    y[1234], y[77] = 50.0, -50.0
    kept = _thin(x, y)
    assert len(kept) <= KEPT + 2
    assert kept[0] == (x[0], y[0])
    assert kept[-1] == (x[-1], y[-1])
    assert {(1234.0, 50.0), (77.0, -50.0)} <= set(kept)
    assert kept == sorted(kept, key=lambda p: p[0])
    assert set(kept) <= set(zip(x, y, strict=True))


def test_a_gap_in_a_line_and_its_hover_values():
    chart = line_chart("t", "d", [Series("a", "red", [1, 2, 3, 4], [1.0, 2.0, math.nan, 3.0])])
    path = re.search(r'<path d="([^"]+)" class="line"', chart).group(1)
    assert path.count("M") == 2
    data = json.loads(html.unescape(re.search(r'data-lines="([^"]+)"', chart).group(1)))
    assert data["series"][0]["y"] == [1.0, 2.0, None, 3.0]
    assert data["series"][0]["x"] == [1, 2, 3, 4]


def _decode(picture: str) -> tuple[np.ndarray, dict]:
    png = re.search(r'href="data:image/png;base64,([^"]+)"', picture).group(1)
    image = np.asarray(Image.open(io.BytesIO(base64.b64decode(png))).convert("RGBA"))
    return image, json.loads(html.unescape(re.search(r'data-cells="([^"]+)"', picture).group(1)))


def test_heat_map_pixels_and_hover_values_are_the_matrix():
    matrix = np.random.default_rng(2).uniform(0, 3, (3, 7))
    matrix[1, 4] = math.nan
    matrix[0, 6] = 9.0  # beyond the limits: the last colour
    picture = heat_map(
        "t", "d", matrix, rows=list("abc"), columns=list("0123456"),
        row_name="layer", column_name="expert", limits=(0.0, 3.0),
    )  # fmt: skip
    image, data = _decode(picture)
    assert image.shape[:2] == matrix.shape
    colors = sequential(255)
    for row in range(3):
        for column in range(7):
            value = matrix[row, column]
            if math.isnan(value):
                assert image[row, column, 3] == 0
            else:
                level = round(min(value, 3.0) / 3.0 * 254)
                assert tuple(image[row, column]) == colors[level]
    levels = np.frombuffer(base64.b64decode(data["levels"]), "<u2").reshape(3, 7)
    values = data["low"] + levels / 65534 * (data["high"] - data["low"])
    known = np.isfinite(matrix)
    assert np.abs(values - matrix)[known].max() < 1e-4 * 9
    assert levels[1, 4] == 65535


def test_large_heat_map_has_no_hover_values():
    matrix = np.ones((160, 161))
    names = [str(i) for i in range(161)]
    picture = heat_map("t", "d", matrix, rows=names[:160], columns=names,
                       row_name="a", column_name="b", limits=(0.0, 1.0))  # fmt: skip
    assert "data-cells" not in picture


def test_one_very_busy_expert_does_not_darken_the_rest():
    even = np.random.default_rng(3).uniform(0.5, 1.5, (20, 40))
    assert shared_limits([even]) == ((0.0, float(even.max())), False)
    busy = even.copy()
    busy[3, 5] = 30.0
    (low, high), clipped = shared_limits([even, busy])
    assert (low, clipped) == (0.0, True)
    assert high < 1.6


def test_largest_groups():
    assert largest_groups([3, 1, 1, 2, 3, 5], 3) == [1, 3, 2]


def test_separation_equals_the_formula():
    rng = np.random.default_rng(4)
    points = [(float(x), float(y), int(g)) for x, y, g in zip(
        rng.normal(size=60), rng.normal(size=60), rng.integers(0, 4, 60), strict=True)]  # fmt: skip
    named = [0, 2, 3]
    mine = [p for p in points if p[2] in named]
    cx, cy = (sum(p[i] for p in mine) / len(mine) for i in (0, 1))
    total = sum((p[0] - cx) ** 2 + (p[1] - cy) ** 2 for p in mine)
    within = 0.0
    for g in named:
        group = [p for p in mine if p[2] == g]
        gx, gy = (sum(p[i] for p in group) / len(group) for i in (0, 1))
        within += sum((p[0] - gx) ** 2 + (p[1] - gy) ** 2 for p in group)
    assert separation(points, named) == pytest.approx(1 - within / total)
    assert separation([(0.0, 1.0, 7), (0.0, 1.0, 7), (5.0, 1.0, 8)], [7, 8]) == pytest.approx(1.0)
    assert math.isnan(separation(points, [9]))


def test_consistency_counts_repeated_tokens_only():
    texts = [{"tokens": ["a", "b", "a", "c"], "experts": [1, 2, 1, 3]},
             {"tokens": ["a", "b"], "experts": [5, 6]}]  # fmt: skip
    # a: 1, 1, 5 -> 2 of 3; b: 2, 6 -> 1 of 2; c occurs once
    assert consistency(texts) == pytest.approx(3 / 5)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (math.nan, "–"), (math.inf, "∞"), (0.86149, "0.861"), (14.2, "14.2"), (0, "0"),
     (1234567, "1\u202f234\u202f567"), (1.5e-6, "1.50e−6"), (-0.0123, "−0.0123"), (0.0, "0"),
     ("text", "–"), (True, "–"), (0.9996, "1.000"), (2345.6, "2\u202f346")],
)  # fmt: skip
def test_number(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.25, "4.2 s"), (200, "3 min 20 s"), (7512, "2 h 5 min"), (None, "–")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text
