"""The colour maps and the PNG that carries them."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from moe_finetune.report.colors import RUNS, diverging, oklch, sequential
from moe_finetune.report.png import indexed_png


def _linear(rgb) -> np.ndarray:
    c = np.asarray(rgb[:3]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def _oklab_lightness(rgb) -> float:
    """The forward transform as Ottosson gives it: linear sRGB -> LMS -> cube root -> L."""
    to_lms = np.array(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ]
    )
    return float(
        np.array([0.2104542553, 0.7936177850, -0.0040720468]) @ np.cbrt(to_lms @ _linear(rgb))
    )


def _luminance(rgb) -> float:
    return float(np.array([0.2126, 0.7152, 0.0722]) @ _linear(rgb))


def test_known_colors():
    # sRGB red and white in OKLCH, from the definition's own table
    assert oklch(0.62796, 0.25768, 29.234) == (255, 0, 0)
    assert oklch(1.0, 0.0, 0.0) == (255, 255, 255)


def test_sequential_map_rises_evenly_in_lightness():
    lightness = np.array([_oklab_lightness(color) for color in sequential(64)])
    steps = np.diff(lightness)
    assert steps.min() > 0
    assert steps.max() < 1.35 * steps.mean()
    assert steps.min() > 0.65 * steps.mean()


def test_diverging_map_fades_to_nothing_in_the_middle():
    colors = diverging(255)
    assert colors[127][3] == 0
    assert [c[3] for c in colors] == [c[3] for c in reversed(colors)]
    assert colors[0][2] > colors[0][0]  # blue
    assert colors[-1][0] > colors[-1][2]  # orange
    assert colors[0][3] == colors[-1][3] == 255


def test_run_colors_stand_out_from_both_grounds():
    for light, dark in RUNS:
        rgb = [tuple(bytes.fromhex(text[1:])) for text in (light, dark)]
        # WCAG 1.4.11: 3 to 1 for graphics
        assert (1.05) / (_luminance(rgb[0]) + 0.05) >= 3
        assert (_luminance(rgb[1]) + 0.05) / (_luminance((22, 26, 33)) + 0.05) >= 3


def test_png_holds_every_cell_in_its_place():
    levels = np.random.default_rng(0).integers(0, 7, (5, 13)).astype(np.uint8)
    palette = [(10 * i, 20 * i, 255 - 30 * i, 255 - 36 * i) for i in range(7)]
    image = np.asarray(Image.open(io.BytesIO(indexed_png(levels, palette))).convert("RGBA"))
    assert image.shape == (5, 13, 4)
    for row in range(5):
        for column in range(13):
            assert tuple(image[row, column]) == palette[levels[row, column]]
