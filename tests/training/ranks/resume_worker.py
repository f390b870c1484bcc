"""What each rank of ``test_other_ranks.py`` runs: training by FSDP2 that other numbers go on with.

Its argument is FOLDER, under RANK and WORLD_SIZE 4. The same processes are four ranks, then two
and one, so that they start once. Steps take four rows everywhere.
"""

import json
import logging
import os
import re
import signal
import sys
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import Trainer, TrainingArguments

from moe_finetune import SpecializationCallback
from moe_finetune.lora.targets import add_lora
from moe_finetune.moe.large.spread_experts import spread_experts
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.training import ranks
from moe_finetune.training.save_and_resume.gathered_weights import trained_weights, whole_model
from moe_finetune.training.save_and_resume.resumable_trainer import ResumableTrainer
from moe_finetune.training.save_and_resume.sharded_state import is_sharded, leave_experts
from tests.support import fsdp, tiny

WORLDS = (4, 2, 1)
STEPS, HALF, ROWS, LENGTH = 5, 3, 4, 9  # HALF lies between two logs
METHODS = {
    "adapter": {
        "terms": {
            "orthogonality": {"weight": 0.1},
            "coupling": {"weight": 0.1},
            "load_balance": {"share": 0.3},
        }
    },
    "spread": {"preset": "orthogonal_variance", "terms": {"variance": {"weight": 0.0}}},
    "whole": {"preset": "loss_free", "terms": {"erc": {"weight": 0.1, "noise": False}}},
}
KILLED = ("whole",)
"""Its save has every kind of file: shards of weights and of states, the method's own, the list."""


class Plain(ResumableTrainer, Trainer):
    """The mixin on transformers' own trainer."""


def model(case: str) -> torch.nn.Module:
    """Two layers of 12 experts; in case "spread" each of several ranks has its part of them."""
    torch.manual_seed(1)
    base = tiny.model("qwen3_moe", num_hidden_layers=2)
    if case == "whole":
        return base
    if case == "spread" and ranks.world_size() > 1:
        spread_experts(base)
    return add_lora(base, LoraSection(rank=4, alpha=8.0), "full")


def train(
    case: str, folder: Path, resume: Path | bool | None = None, every: int = HALF
) -> dict[str, torch.Tensor]:
    """Train to the end; the weights on rank 0. The log goes into ``log.json``."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(case != "spread").lower()
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(4, 260, (ROWS * STEPS, LENGTH), generator=generator).tolist()
    arguments = TrainingArguments(
        str(folder),
        max_steps=STEPS,
        save_steps=every,
        logging_steps=2,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=ROWS // ranks.world_size(),
        learning_rate=1e-3,
        adam_epsilon=1e-5,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    callback = SpecializationCallback(METHODS[case])
    dataset = Dataset.from_dict({"input_ids": ids, "labels": ids})
    trainer = Plain(model(case), arguments, train_dataset=dataset, callbacks=[callback])
    callback.attach(trainer)
    leave_experts(trainer)
    trainer.train(resume_from_checkpoint=resume)
    assert is_sharded(trainer.model) == (ranks.world_size() > 1), "accelerate fell back to DDP"
    if ranks.rank() == 0:
        rows = [row for row in trainer.state.log_history if "loss" in row]
        (folder / "log.json").write_text(json.dumps(rows))
    weights = trained_weights(trainer.model)
    for kept in (weights, whole_model(trainer.model)):
        assert bool(kept) == (ranks.rank() == 0), "rank 0 alone keeps what is gathered"
    return {**weights, **callback.table_state()}


def killed(out: Path, name: str, place: str) -> None:
    """Two ranks that go on from ``out / name``; one dies where it first touches ``place``."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    fsdp.use()
    ranks.join_group()

    def hook(event: str, arguments: tuple) -> None:
        writes = event == "open" and "w" in str(arguments[1])
        if writes and re.search(place, str(arguments[0])):
            os.kill(os.getpid(), signal.SIGKILL)

    if place:
        sys.addaudithook(hook)
    for case in KILLED:
        weights = train(case, out / f"{case}-{name}", resume=True, every=1)
        if ranks.rank() == 0:
            save_file(
                {k: v.detach().cpu().contiguous() for k, v in weights.items()},
                out / f"{case}-{name}" / "weights.safetensors",
            )
        ranks.barrier()


def main(out: Path) -> None:
    """Straight through with four ranks, then on from the middle with each number."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    fsdp.use()
    for world in WORLDS:
        if int(os.environ["RANK"]) >= world:
            return
        fsdp.regroup(world)
        for case in METHODS:
            straight = out / f"{case}-straight"
            runs = {straight.name: None} if world == WORLDS[0] else {}
            runs[f"{case}-{world}"] = straight / f"checkpoint-{HALF}"
            for name, resume in runs.items():
                weights = train(case, out / name, resume)
                if ranks.rank() == 0:
                    held = {k: v.detach().cpu().contiguous() for k, v in weights.items()}
                    save_file(held, out / name / "weights.safetensors")
                ranks.barrier()


if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    killed(*map(Path, sys.argv[1:2]), *sys.argv[2:]) if sys.argv[2:] else main(Path(sys.argv[1]))
