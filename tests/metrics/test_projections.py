import numpy as np

from moe_finetune.metrics.projections import gate_experts, gate_row_points, principal_points


def test_principal_points_are_projections_of_the_busiest_experts_tokens():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(90, 7)) * np.array([9, 5, 1, 1, 1, 1, 1])
    top = rng.integers(0, 5, 90)
    load = np.array([3, 90, 4, 80, 70])
    found = principal_points(6, rows, top, load)
    chosen = np.flatnonzero(np.isin(top, [1, 3, 4]))
    points = np.array(found["points"])
    assert found["layer"] == 6 and points[:, 2].astype(int).tolist() == top[chosen].tolist()
    centered = rows[chosen] - rows[chosen].mean(0)
    values, vectors = np.linalg.eigh(centered.T @ centered)
    wanted = centered @ vectors[:, np.argsort(-values)[:2]]
    np.testing.assert_allclose(np.abs(points[:, :2]), np.abs(wanted), atol=1e-3)
    assert principal_points(6, rows[:2], top[:2] * 0 + 1, load)["points"] == []


def test_gate_rows_of_experts_apart_stay_apart():
    experts = gate_experts(20)
    assert experts == [0, 8, 16]
    rng = np.random.default_rng(1)
    centers = 20 * rng.normal(size=(3, 1, 11))
    rows_EDH = centers + rng.normal(size=(3, 90, 11))
    found = gate_row_points(4, rows_EDH, experts)
    points = np.array(found["points"])
    assert found["layer"] == 4 and len(points) == 3 * 30  # every third row of each
    clusters = np.stack([points[points[:, 2] == e, :2].mean(0) for e in experts])
    nearest = np.linalg.norm(points[:, None, :2] - clusters, axis=-1).argmin(1)
    assert (np.array(experts)[nearest] == points[:, 2]).all()
    assert gate_row_points(4, rows_EDH, experts) == found  # it repeats
    assert gate_row_points(4, rows_EDH[:1, :3], [0])["points"] == []


def test_principal_points_are_drawn_over_all_tokens():
    rows = np.random.default_rng(0).normal(size=(2000, 5))
    rows[1000:] += 9
    found = principal_points(3, rows, np.ones(2000, int), np.array([0, 5, 1]))["points"]
    ends = np.array([x for x, *_ in found])
    assert len(found) == 450 and 180 < (ends > 0).sum() < 270
    assert found == principal_points(3, rows, np.ones(2000, int), np.array([0, 5, 1]))["points"]
