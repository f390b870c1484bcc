"""A small upcycle for tests of the verb: its recipe, and how it is run and read."""

from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file

from moe_finetune import cli
from moe_finetune.io.row_files import write_jsonl
from tests.upcycle import dense

BALANCE = {"preset": "supervised_routing_baseline"}
ARMS = {
    "dense": {"start": "dense", "label": "Dense", "expert_steps": True},
    "btx": {"start": "merged", "label": "BTX"},
    "btx_balance": {"start": "merged", "label": "BTX + balance", "method": BALANCE},
    "svmoe_balance": {"start": "router", "label": "SvMoE + balance", "method": BALANCE},
    "svmoe": {"start": "router", "label": "SvMoE"},
}
TRAINER = {"max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1.0e-2}


def run(capsys, *arguments) -> tuple[int, str]:
    code = cli.main([str(argument) for argument in arguments])
    return code, capsys.readouterr().err


def write_recipe(folder: Path, **changes) -> Path:
    """A recipe with three experts over six categories, one seed and the paper's arms."""
    if not (folder / "dense").exists():
        dense.save("llama", folder / "dense", 1)
    write_suite(folder / "suite.yaml")
    arms = changes.pop("arms", ARMS)
    recipe = {
        "dense": {"path": str(folder / "dense"), "dtype": "float32"},
        "texts": {"categories": dense.write_categories(folder / "texts", 6), "max_length": 24},
        "clusters": {"count": 3},
        "experts": {"trainer": TRAINER},
        "merge": {"top_k": 2, "router_std": 0.3},
        "router": {"trainer": {**TRAINER, "learning_rate": 0.1}},
        "finetune": {"trainer": {**TRAINER, "max_steps": 2}},
        "evaluation": {"texts": 2, "suite": str(folder / "suite.yaml")},
        **changes,
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe) + yaml.safe_dump({"arms": arms}, sort_keys=False))
    return file


def write_suite(file: Path, ascending: bool = True) -> Path:
    """A suite of questions, whose rows lie next to it."""
    rows = [
        {"question": f"Is {n} even?", "choices": ["no", "ja"], "answer": (n + 1) % 2,
         "category": f"kind{n}"}
        for n in range(6)
    ]  # fmt: skip
    write_jsonl(file.with_suffix(".jsonl"), rows if ascending else rows[::-1])
    task = {"task": "judgement", "template": "local_judgement", "shots": 0, "metric": "acc",
            "files": {"test": f"{file.stem}.jsonl"}}  # fmt: skip
    file.write_text(yaml.safe_dump({"name": "questions", "tasks": [task]}))
    return file


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def dense_of(recipe: Path) -> Path:
    return Path(yaml.safe_load(recipe.read_text())["dense"]["path"])
