"""Pictures of single layers: groups that an eye can see are shown, chance is folded."""

import json

import numpy as np
import pytest

from moe_finetune.report.context import Report
from moe_finetune.report.runs import read_runs
from moe_finetune.report.sections.specialization import SPECIALIZATION, _separation


@pytest.mark.parametrize(("pull", "visible"), [(0.0, False), (3.0, True)])
def test_a_scatter_without_groups_is_folded_and_says_so(tmp_path, pull, visible):
    rng = np.random.default_rng(2)
    experts_N = np.repeat([1, 4, 6], 70)
    points_N2 = (
        rng.normal(size=(210, 2))
        + pull * np.array([[0, 0], [1, 0], [0, 1]])[np.repeat(np.arange(3), 70)]
    )
    rows = [[*point, int(e)] for point, e in zip(points_N2.tolist(), experts_N, strict=True)]
    snapshot = {"layers": [3, 5], "num_experts": 7, "load": [[3, 1, 2, 5, 1, 1, 4]] * 2}
    snapshot["embeddings"] = {"layer": 5, "points": rows}
    (tmp_path / "run" / "routing").mkdir(parents=True)
    (tmp_path / "run" / "routing" / "after.json").write_text(json.dumps(snapshot))
    markup = SPECIALIZATION.render(Report(read_runs([tmp_path / "run"]), "title"))
    folded = "<summary>PCA of embeddings: no visible structure</summary>"
    assert (folded in markup) == (not visible)
    assert ("layer 5: no visible structure (separation 0.0" in markup) == (not visible)
    assert ("<h3>PCA of embeddings</h3>" in markup) == visible


def test_noise_is_what_shuffled_labels_give():
    rng = np.random.default_rng(5)
    points = [(*rng.normal(size=2).tolist(), int(rng.integers(5))) for _ in range(24)]
    separation, noise = _separation(points)
    assert 0.05 < separation <= noise < 0.6  # few points: large by chance, and so is the noise
    assert _separation([(x + 9 * e, y, e) for x, y, e in points])[0] > noise
