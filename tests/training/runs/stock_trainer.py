"""The same small training by ``moe-finetune train``, and by TRL, PEFT and transformers only.

``python -m tests.training.runs.stock_trainer FOLDER RECIPE`` is one of two ranks that train both.
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer

from moe_finetune import cli
from tests.support import tiny

STEPS, SEED = 7, 11
WEIGHTS = "adapter_model.safetensors"
ROWS = [
    {"prompt": f"What is {n} plus {7 * n}?", "completion": f" It is {8 * n}." + " x" * (n % 5)}
    for n in range(15)  # in twos, the last one of an epoch has one row
]
TRAINER = {
    "per_device_train_batch_size": 2,
    "max_steps": STEPS,
    "logging_steps": 1,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "cosine",
    # With 1e-8 Adam turns the rounding of a gradient near zero into a whole step.
    "adam_epsilon": 1e-5,
    "weight_decay": 0.1,
    "report_to": [],
    "disable_tqdm": True,
}
# The recipe's part, and PEFT's own words for it.
EXPERTS, ATTENTION = "experts, attention and router", "attention with dropout, router in full"
ADAPTERS = {
    EXPERTS: (
        {
            "lora": {"rank": 3, "alpha": 12.0, "targets": ["attention", "experts"]},
            "router": {"train": "lora"},
        },
        {
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
            "target_parameters": [
                "mlp.gate.weight",
                "mlp.experts.gate_up_proj",
                "mlp.experts.down_proj",
            ],
        },
    ),
    ATTENTION: (
        {
            "lora": {"rank": 3, "alpha": 12.0, "targets": ["attention"], "dropout": 0.2},
            "router": {"train": "full"},
        },
        {
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
            "modules_to_save": ["mlp.gate"],
            "lora_dropout": 0.2,
        },
    ),
}
Trained = tuple[list[float], dict[str, Tensor]]
"""The loss of each step, and the tensors of the adapter."""


def write_inputs(folder: Path) -> None:
    """A tiny checkpoint, and rows of unequal length."""
    tiny.save("qwen3_moe", folder / "base", num_hidden_layers=2)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def write_recipe(folder: Path, file: Path, adapter: str, **trainer: object) -> Path:
    document = {
        "model": {"path": str(folder / "base"), "dtype": "float32"},
        "method": "none",
        **ADAPTERS[adapter][0],
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 64, "packing": False},
        "trainer": {**TRAINER, "seed": SEED, "save_strategy": "no", **trainer},
        "export": {"merge": False},
    }
    file.write_text(json.dumps(document))
    return file


def ours(recipe: Path, run: Path, *options: str) -> Trained:
    """By the command, with more ``options`` of its command line."""
    assert cli.main(["train", str(recipe), "--output", str(run), *options]) == 0
    return read_run(run)


def read_run(run: Path) -> Trained:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    return losses, load_file(run / "adapter" / WEIGHTS)


class Interrupted(Exception):
    """Ends a training between two saves."""


class Interrupt(TrainerCallback):
    """Raises after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Interrupted


def stock_trainer(folder: Path, output: Path, adapter: str, **trainer: object) -> SFTTrainer:
    """TRL's trainer as it is, with PEFT's adapter."""
    set_seed(SEED)
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    config = LoraConfig(r=3, lora_alpha=12, task_type="CAUSAL_LM", **ADAPTERS[adapter][1])
    arguments = SFTConfig(
        str(output), seed=SEED, use_cpu=True, bf16=False, max_length=64, router_aux_loss_coef=0.0,
        completion_only_loss=True, gradient_checkpointing=False,
        **{**TRAINER, "save_strategy": "no", **trainer},
    )  # fmt: skip
    return SFTTrainer(
        get_peft_model(base, config),
        args=arguments,
        train_dataset=Dataset.from_list(ROWS).shuffle(SEED),
        processing_class=AutoTokenizer.from_pretrained(folder / "base"),
    )


def train_stock(
    folder: Path, output: Path, adapter: str, resume: bool = False, **trainer: object
) -> None:
    made = stock_trainer(folder, output, adapter, **trainer)
    made.train(resume_from_checkpoint=resume)
    made.save_model(str(output / "adapter"))
    made.save_state()


def read_stock(output: Path) -> Trained:
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    losses = [row["loss"] for row in history if "loss" in row]
    return losses, load_file(output / "adapter" / WEIGHTS)


if __name__ == "__main__":
    where, recipe_file = Path(sys.argv[1]), Path(sys.argv[2])
    assert cli.main(["train", str(recipe_file), "--output", str(where / "ours")]) == 0
    train_stock(where, where / "stock", EXPERTS)
