"""The plan of a run whose rows are shorter than ``data.max_length``, against the run itself."""

import json
from unittest.mock import patch

import pytest
import torch
from torch.nn import Embedding
from trl.kernels import ChunkedLogProbFunction

from eval.bench.measured import LiveBytes
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.yaml_tree import Tree
from moe_finetune.training.before.prepare import prepare
from moe_finetune.training.memory.step_bytes import EVALUATION
from moe_finetune.training.run.train import train
from moe_finetune.training.stages.rewards import REWARDS
from tests.support import tiny
from tests.training.memory.fake_step import fake_plan

WORDS = [4, 31, 9, 17, 26, 12, 21, 7, 15, 11]
"""Words of each row's answer, of which one is longest."""
ROWS = {
    "sft": [{"prompt": f"Say {n}: ", "completion": "well " * n} for n in WORDS],
    "dpo": [{"prompt": "Say: ", "chosen": "no", "rejected": "well " * n} for n in WORDS],
    "grpo": [{"prompt": "well " * n, "answer": str(n)} for n in WORDS[:4]],
}
LONGER = [{**row, "rejected": row["rejected"] + "far" * 30} for row in ROWS["dpo"][:6]]
SETTINGS = {
    "sft": ("sft", {}, {}),
    "packed": ("sft", {"packing": True, "max_length": 512}, {}),
    "dpo": ("dpo", {}, {}),
    "grpo": ("grpo", {}, {"num_generations": 3, "max_completion_length": 41}),
    "evaluated": ("dpo", {"validation": "longer"}, {"per_device_train_batch_size": 1}),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_plan_is_of_the_rows_that_the_trainer_batches(setting, tmp_path, monkeypatch):
    monkeypatch.setitem(
        REWARDS._values, "length", lambda completions, **_: [*map(len, completions)]
    )
    stage, data, trainer = SETTINGS[setting]
    tiny.save("qwen3_moe", tmp_path / "base", num_hidden_layers=4)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS[stage]), encoding="utf-8")
    if "validation" in data:
        longer = tmp_path / "longer.jsonl"
        longer.write_text("".join(json.dumps(row) + "\n" for row in LONGER), encoding="utf-8")
        data = {"validation": str(longer)}
    values = {
        "stage": stage,
        "model": {"path": str(tmp_path / "base"), "dtype": "float32", "experts_kernel": "grouped"},
        "method": {"preset": "none"},
        "lora": {"rank": 4},
        "data": {"train": str(rows), "max_length": 2048, **data},
        "trainer": {"per_device_train_batch_size": 3, "num_train_epochs": 1, "save_strategy": "no",
                    "report_to": [], **trainer},
        **({"rewards": ["length"]} if stage == "grpo" else {}),
    }  # fmt: skip
    recipe = recipe_from_tree(Tree(values))
    inputs = prepare(recipe)
    plan = inputs.memory
    peak, steps, evaluations = counted(recipe, inputs, tmp_path / "run")
    largest = max(evaluations) if plan.moment == EVALUATION else max(steps)
    assert largest == plan.batch.tokens and plan.batch.read
    assert "longest row" in plan.lines()[0]
    step = fake_plan(inputs.start.config, recipe, "cpu", inputs.rows.lengths)
    assert plan.activations > 0.5 * plan.total  # what is compared is not the weights
    # On a CPU, embeddings that an evaluation keeps for its pictures are in the same memory.
    assert (0.85 if setting == "evaluated" else 0.9) < step.total / peak < 1.1
    assert plan.total > 0.85 * peak


def counted(recipe, inputs, output):
    """Bytes of live tensors at the run's peak; tokens of its forwards with and without a graph."""
    apply, embed = ChunkedLogProbFunction.apply, Embedding.forward
    tokens = {True: [], False: []}

    def narrow(hidden, head, bias, labels, heat, tile, *rest):
        """Tiles of logits no wider than the vocabulary, so that only touched memory counts."""
        return apply(hidden, head, bias, labels, heat, min(tile, head.shape[0]), *rest)

    def noted(module, ids):
        tokens[torch.is_grad_enabled()].append(ids.numel())
        return embed(module, ids)

    with (
        patch.object(ChunkedLogProbFunction, "apply", narrow),
        patch.object(Embedding, "forward", noted),
        LiveBytes() as live,
    ):
        train(recipe, RunFolder(output), inputs)
    return live.peak, tokens[True], tokens[False]
