"""What each rank of ``test_ranks.py`` runs: methods through the run's own trainer.

``python -m tests.training.ranks.ranks_worker OUT`` under RANK and WORLD_SIZE; rank 0 writes OUT.
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
from moe_finetune.plugins import use_file
from moe_finetune.recipe.schema import Recipe
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.training import ranks
from moe_finetune.training.run.trainer import build_trainer
from moe_finetune.training.save_and_resume.gathered_weights import trained_weights
from tests.conftest import ROOT
from tests.support import tiny
from tests.support.tiny_adapter import random_factors

STEPS, GLOBAL_BATCH, LENGTH = 4, 4, 13
EVERY_TERM = {
    "load_balance": {"weight": 0.3, "scope": "global_batch"},
    # Of a forward's own variance the mean over ranks is another number, by definition.
    **{name: {"weight": 0.3} for name in ("orthogonality", "specialization", "dpp", "ncl", "erc")},
    "router_orthogonality": {"weight": 6.0},
    "z_loss": {"weight": 0.02},
    "coupling": {"weight": 2.0},
}
SHARES = {
    "load_balance": {"share": 0.5, "scope": "global_batch"},
    "orthogonality": {"share": 0.3},
}
WRONG = "aux_loss, each rank for itself"
METHODS = {
    "every term": {"terms": EVERY_TERM, "strength": {"first": False}},
    "loss_free": {"preset": "loss_free"},
    "found weights": {
        "preset": "orthogonal_variance_released",
        "terms": {"load_balance": {"scope": "global_batch", "weight": 0.3}},
    },
    "shares": {"terms": SHARES},
}
CONTROLS = {
    WRONG: {"terms": {"load_balance": {"weight": 0.3, "scope": "micro_batch"}}},
}
WITHOUT = {
    f"without {term}": {
        "terms": {name: options for name, options in EVERY_TERM.items() if name != term},
        "strength": {"first": False},
    }
    for term in EVERY_TERM
}
"""What one process trains alone: a term that these do not differ by would not be compared."""
HAS_STATE = ("loss_free", "shares", "found weights")


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


def train(name, method, folder):
    recipe = Recipe.model_validate(
        {
            "model": {"path": "unused", "dtype": "float32"},
            "method": method,
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
        b"".join(tables[key].cpu().numpy().tobytes() for key in sorted(tables))
    )
    assert all(blob == blobs[0] for blob in blobs), f"{name}: tables differ between ranks"
    assert (len(blobs[0]) > 0) == (name in HAS_STATE), name
    return logged, {**trained_weights(trainer.model), **tables}


def main(out: Path) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    ranks.join_group()
    use_file(ROOT / "recipes" / "plugins" / "p0_released.py")
    results, tensors = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        alone = WITHOUT if ranks.world_size() == 1 else {}
        for number, (name, method) in enumerate({**METHODS, **CONTROLS, **alone}.items()):
            results[name], weights = train(name, method, Path(folder) / str(number))
            tensors |= {f"{name}/{key}": value for key, value in weights.items()}
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
