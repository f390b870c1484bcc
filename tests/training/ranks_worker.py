"""What each rank of ``test_ranks.py`` runs: every preset through the run's own trainer.

``python -m tests.training.ranks_worker OUT`` under RANK and WORLD_SIZE; rank 0 writes OUT.
"""

import json
import logging
import os
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file

from moe_finetune.lora.targets import add_lora
from moe_finetune.losses.presets import PRESETS
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.training import ranks
from moe_finetune.training.full_weights import trained_weights
from moe_finetune.training.trainer import build_trainer
from tests import tiny
from tests.tiny_adapter import random_factors

STEPS, GLOBAL_BATCH, LENGTH = 4, 4, 13
NEEDS_A_FILE = {"supervised_routing", "supervised_routing_baseline"}
COMPARED = sorted(set(PRESETS) - NEEDS_A_FILE)
WRONG = "aux_loss, each rank for itself"
TRANSITION = "coupling, transition"
SHARE = "shares"
FINDS_STATE = ("loss_free", TRANSITION, SHARE, "orthogonal_variance_released")


def model():
    torch.manual_seed(1)
    built = add_lora(
        tiny.model("qwen3_moe", num_hidden_layers=2), LoraSection(rank=4, alpha=8.0), "full"
    )
    random_factors(built, 0.1)
    return built


def rows():
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(4, 260, (GLOBAL_BATCH * STEPS, LENGTH), generator=generator).tolist()
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def method(preset):
    if preset == WRONG:
        return {"terms": {"load_balance": {"weight": 0.3, "scope": "micro_batch"}}}
    if preset == TRANSITION:
        return {"terms": {"coupling": {"weight": 0.1, "pairing": "transition"}}}
    if preset == SHARE:
        return {
            "terms": {
                "load_balance": {"share": 0.5, "scope": "global_batch"},
                "orthogonality": {"share": 0.3},
            },
        }
    # Strength is compared where a share needs it.
    chosen = {"preset": preset, "strength": {"first": False}}
    if "load_balance" in PRESETS[preset].terms:
        chosen["terms"] = {"load_balance": {"scope": "global_batch", "weight": 0.3}}
    if "variance" in PRESETS[preset].terms:  # a forward's own variance, by definition
        chosen["terms"]["variance"] = {"weight": 0.0}
    if PRESETS[preset].perturbations:  # noise is drawn by token, and tokens lie elsewhere
        chosen["perturbations"] = {
            "jitter": None,
            "expert_dropout": None,
            "random_second_choice": False,
        }
    return chosen


def train(preset, folder):
    recipe = Recipe.model_validate(
        {
            "model": {"path": "unused", "dtype": "float32"},
            "method": method(preset),
            "lora": {"rank": 4, "alpha": 8.0},
            "data": {"train": "unused", "max_length": LENGTH},
            "trainer": {
                "per_device_train_batch_size": GLOBAL_BATCH // ranks.world_size(),
                "max_steps": STEPS,
                "logging_steps": 1,
                "save_strategy": "no",
                "learning_rate": 1e-3,
                # With 1e-8 Adam turns the rounding of a gradient near zero into a whole step.
                "adam_epsilon": 1e-5,
                "report_to": [],
                "disable_tqdm": True,
            },
        }
    )
    trainer, callback = build_trainer(recipe, folder, model(), tiny.tokenizer(), rows(), None)
    trainer.train()
    logged = [
        {
            k: v
            for k, v in row.items()
            if k == "loss" or k.startswith(("losses/", "routing/", "strength/"))
        }
        for row in trainer.state.log_history
        if "loss" in row
    ]
    tables = callback.table_state()
    blobs = ranks.gather_bytes(
        b"".join(tables[name].cpu().numpy().tobytes() for name in sorted(tables))
    )
    assert all(blob == blobs[0] for blob in blobs), f"{preset}: tables differ between ranks"
    assert (len(blobs[0]) > 0) == (preset in FINDS_STATE), preset
    return logged, {**trained_weights(trainer.model), **tables}


def main(out: Path) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    ranks.join_group()
    results, tensors = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for number, preset in enumerate([*COMPARED, SHARE, WRONG, TRANSITION]):
            results[preset], weights = train(preset, Path(folder) / str(number))
            tensors |= {f"{preset}/{name}": value for name, value in weights.items()}
    if ranks.rank() == 0:
        out.mkdir()
        (out / "logged.json").write_text(json.dumps(results))
        save_file(
            {k: v.detach().cpu().contiguous() for k, v in tensors.items()}, out / "w.safetensors"
        )
    ranks.barrier()


if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    main(Path(sys.argv[1]))
