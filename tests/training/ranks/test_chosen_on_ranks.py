"""Counts of experts are summed over ranks: two choose what one chooses."""

import json

import pytest

from moe_finetune.lora.select import ExpertSelection
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow


def test_two_ranks_choose_the_experts_of_one(warm, tmp_path, tiny_checkpoint):
    rows = [{"text": f"{n} words and {n * n} letters " * (n % 3 + 1)} for n in range(31)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "model": {"path": str(tiny_checkpoint("olmoe")), "dtype": "float32"},
        "method": "none",
        "lora": {"rank": 4, "experts": {"top": 0.3}},
        "data": {"train": str(tmp_path / "rows.jsonl"), "max_length": 80},
        "trainer": {"max_steps": 4, "per_device_train_batch_size": 2, "report_to": "none"},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    chosen = {}
    for world in (1, 2):
        folder = tmp_path / str(world)
        folder.mkdir()
        run_ranks("tests.training.ranks.chosen_worker", world, tmp_path / "recipe.yaml", folder)
        answers = {(folder / f"{rank}.txt").read_text() for rank in range(world)}
        assert len(answers) == 1
        chosen[world] = ExpertSelection.read(folder / "experts.json")
    assert chosen[1].experts == chosen[2].experts
    assert chosen[1].tokens == chosen[2].tokens
    assert chosen[1].weight_share == pytest.approx(chosen[2].weight_share, rel=1e-6)
