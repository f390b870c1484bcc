"""Scales, lines and heat maps."""

import base64
import html
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from moe_finetune import report
from moe_finetune.report.charts.frame import Scale, tick_text
from moe_finetune.report.charts.heatmap import heat_map, legend, shared_limits
from moe_finetune.report.charts.lines import KEPT, Series, _thin, line_chart, moving_mean
from moe_finetune.report.markup import number


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


def test_noise_does_not_fill_the_frame():
    scale = Scale.around([2.000001, 2.0, 2.000002])
    assert scale.high - scale.low >= 0.05 * 2


def test_run_colors_stand_out_from_both_grounds():
    style = Path(report.__file__).with_name("page.css").read_text()
    pairs = re.findall(r"--run-\d: light-dark\(#(\w+), #(\w+)\)", style)
    assert len(pairs) == 7

    def luminance(color):
        linear = [(c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4)
                  for c in bytes.fromhex(color)]  # fmt: skip
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for light, dark in pairs:  # WCAG 1.4.11: 3 to 1 for graphics, on white and on the dark card
        assert 1.05 / (luminance(light) + 0.05) >= 3
        assert (luminance(dark) + 0.05) / (luminance("161a21") + 0.05) >= 3


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


def test_a_heat_map_s_levels_are_its_frames():
    frames = np.random.default_rng(2).uniform(-1, 3, (2, 3, 7))
    frames[1, 1, 4] = math.nan
    picture = heat_map(
        "t", "d", frames, rows=list("abc"), columns=list("0123456"),
        row_name="layer", column_name="expert", limits=(0.0, 3.0), picks=[0, 0, 1],
    )  # fmt: skip
    data = json.loads(html.unescape(re.search(r'data-cells="([^"]+)"', picture).group(1)))
    levels = np.frombuffer(base64.b64decode(data["levels"]), "<u2").reshape(2, 3, 7)
    values = data["low"] + levels / 65534 * (data["high"] - data["low"])
    known = np.isfinite(frames)
    assert np.abs(values - frames)[known].max() < 1e-4 * 4
    assert levels[1, 1, 4] == 65535 and data["picks"] == [0, 0, 1]


def test_one_very_busy_expert_does_not_darken_the_rest():
    even = np.random.default_rng(3).uniform(0.5, 1.5, (20, 40))
    assert shared_limits([even]) == ((0.0, float(even.max())), False)
    busy = even.copy()
    busy[3, 5] = 30.0
    (low, high), clipped = shared_limits([even, busy])
    assert (low, clipped) == (0.0, True)
    assert high < 1.6
    ends = {clipped: str(legend((0.5, 1.25), "share", clipped=clipped)) for clipped in (0, 1)}
    assert ">0.500<" in ends[0] and ">1.25<" in ends[0] and "≥" not in ends[0]
    assert ">≥ 1.25<" in ends[1]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (math.nan, "–"), (math.inf, "∞"), (0.86149, "0.861"), (14.2, "14.2"), (0, "0"),
     (1234567, "1\u202f234\u202f567"), (1.5e-6, "1.50e−6"), (-0.0123, "−0.0123"), (0.0, "0"),
     ("text", "–"), (True, "–"), (0.9996, "1.000"), (2345.6, "2\u202f346")],
)  # fmt: skip
def test_number(value, text):
    assert number(value) == text
