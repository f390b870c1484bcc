"""What each rank of ``test_stages_sharded.py`` runs: one step of every stage with experts spread
over the ranks, by FSDP2, by both, then alone.

Its argument is FOLDER, under RANK and WORLD_SIZE 2. Two ranks take the
micro-batches that one process then takes one after the other.
"""

import json
import logging
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from transformers import (
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    TrainerCallback,
)

from moe_finetune.checkpoint.load_model import load_model
from moe_finetune.data.load_rows import load_for_stage
from moe_finetune.lora.targets import add_lora
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.stages import STAGES
from moe_finetune.recipe.yaml_tree import Tree
from moe_finetune.training import ranks
from moe_finetune.training.run.trainer import build_trainer
from moe_finetune.training.save_and_resume.gathered_weights import plain_name
from moe_finetune.training.save_and_resume.sharded_state import is_sharded
from moe_finetune.training.stages.rewards import REWARDS
from tests.support import fsdp, tiny
from tests.support.tiny_adapter import random_factors

PLAIN, RAGGED = "sft without a method", "grpo whose completions end early"
CASES = (*STAGES, PLAIN, RAGGED)
WORLD, LENGTH = 2, 7
PAD, END = tiny.tokenizer().pad_token_id, tiny.tokenizer().eos_token_id
SPREAD, SHARDED, BOTH, ALONE = MODES = ("spread", "sharded", "both", "alone")
# Means over tokens, which are as many in every micro-batch here, or of weights alone: the trainer
# of GRPO cuts a step into other micro-batches.
TERMS = {
    "orthogonality": {"weight": 0.3},
    "z_loss": {"weight": 0.02},
    "router_orthogonality": {"weight": 0.3},
    "erc": {"weight": 0.3, "noise": False},
}
PAIRS = [
    {"prompt": f"Say {n} ", "chosen": f"yes {n * n:02d}", "rejected": f"no, {9 - n}"}
    for n in range(6)
]
PROMPTS = [{"prompt": f"{n} + {n} = "} for n in range(6)]
ROWS = {
    "sft": [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in PAIRS],
    "pretrain": [{"text": f"There were {n} trees."} for n in range(6)],
    "dpo": PAIRS,
    "grpo": PROMPTS,
}


def reward(completion_ids, **_):
    return [sum(ids) % 11 / 10 for ids in completion_ids]


class Gradients(TrainerCallback):
    """Keeps the whole gradients of the first step."""

    def __init__(self) -> None:
        self.held: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad
                grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                self.held[plain_name(name)] = grad.detach().clone()


def recipe(case: str, folder: Path) -> Any:
    """One step of six rows."""
    stage = {PLAIN: "sft", RAGGED: "grpo"}.get(case, case)
    file = folder / f"{stage}-{ranks.rank()}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS[stage]))
    trainer = {
        "max_steps": 1,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": WORLD // ranks.world_size(),
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
    }
    if stage == "grpo":
        trainer |= {"num_generations": 3, "beta": 0.1, "max_completion_length": LENGTH}
    tree = {
        "stage": stage,
        "model": {"path": "unused", "dtype": "float32"},
        # Measuring strength takes several times a step's backward, and changes nothing.
        "method": {
            "terms": {} if case in (PLAIN, RAGGED) else TERMS,
            "strength": {"first": False},
        },
        "lora": {"rank": 4, "alpha": 8, "dropout": 0.0},
        "data": {"train": str(file), "max_length": 64, "packing": False},
        "trainer": trainer,
    }
    if stage == "grpo":
        REWARDS._values["mine"] = reward
        tree["rewards"] = ["mine"]
        if case == RAGGED:
            tree["router"] = {"replay": "old_policy"}
            trainer["num_iterations"] = 2
    return recipe_from_tree(Tree(tree))


def student(mode: str) -> torch.nn.Module:
    """A tiny model with an adapter that does something."""
    if mode in (SPREAD, BOTH):
        folder = Path(os.environ["STAGES_FOLDER"]) / "base"
        base = load_model(folder, dtype="float32", expert_ranks=WORLD)
        assert base.model.layers[1].mlp.experts.num_experts == 6, "the experts are not spread"
    else:
        base = tiny.model("qwen3_moe", num_hidden_layers=2)
    torch.manual_seed(1)
    made = recipe("sft", Path(os.environ["STAGES_FOLDER"])).lora
    built = add_lora(base, made, "full")
    random_factors(built, 0.05)
    return built


class Fixed(LogitsProcessor):
    """Leaves one token to sample: what follows from the prompt, on any number of ranks."""

    made_BC: torch.Tensor | None = None
    ragged = False
    log_probs: ClassVar[list[torch.Tensor]] = []

    def __call__(self, input_ids, scores):
        if self.made_BC is None:
            self.start, seen, made = input_ids.shape[1], Counter(), []
            for row in input_ids.tolist():
                prompt = sum(token for token in row if token != PAD)
                seen[prompt] += 1
                generator = torch.Generator().manual_seed(prompt * 31 + seen[prompt])
                made.append(torch.randint(4, 260, (LENGTH,), generator=generator))
                if self.ragged:  # of one length for each prompt, and so for each of two ranks
                    made[-1][1 + prompt // 2 % 5] = END
            self.made_BC = torch.stack(made)
            self.log_probs.clear()
        next_B1 = self.made_BC[:, input_ids.shape[1] - self.start, None]
        self.log_probs.append(scores.float().log_softmax(-1).gather(1, next_B1))
        return torch.full_like(scores, -torch.inf).scatter(1, next_B1, 0.0)


def fixed_completions(generate: Any = GenerationMixin.generate) -> None:
    """Let generation be real, and sample the same everywhere."""

    def with_fixed(self, *args, **kwargs):
        return generate(self, *args, logits_processor=LogitsProcessorList([Fixed()]), **kwargs)

    GenerationMixin.generate = with_fixed


def return_log_probs(trainer: Any) -> None:
    """Let generation return what the model gave to each token, as vLLM does."""
    generate = trainer._generate_single_turn

    def generated(*args):
        completions, _ = generate(*args)
        rows = torch.cat(Fixed.log_probs, dim=1).tolist()
        return completions, [row[: len(ids)] for row, ids in zip(rows, completions, strict=True)]

    trainer._generate_single_turn = generated


def step(case: str, folder: Path, mode: str) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Gradients and the log of one step."""
    asked, tokenizer = recipe(case, folder), tiny.tokenizer()
    data = load_for_stage(asked, tokenizer).train
    output = folder / f"{case}-{mode}"
    output.mkdir(exist_ok=True)
    trainer, callback = build_trainer(asked, output, student(mode), tokenizer, data, None)
    Fixed.ragged = case == RAGGED
    held = Gradients()
    trainer.add_callback(held)
    if case in ("grpo", RAGGED):
        return_log_probs(trainer)
    try:
        trainer.train()
    finally:
        callback.close()
    assert is_sharded(trainer.model) == (mode in (SHARDED, BOTH)), "accelerate fell back to DDP"
    return held.held, trainer.state.log_history[0]


def main(folder: Path) -> None:
    """Every case by two ranks, in three ways, then by the first of them."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ["STAGES_FOLDER"] = str(folder)
    fixed_completions()
    for mode in MODES:
        world = 1 if mode == ALONE else WORLD
        if int(os.environ.get("RANK", "0")) >= world:
            return
        if mode == SHARDED:
            fsdp.use()
        if mode == BOTH:
            os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
        fsdp.regroup(world)
        tensors, logs = {}, {}
        for case in CASES:
            gradients, logs[case] = step(case, folder, mode)
            tensors |= {f"{case}/{name}": grad.contiguous() for name, grad in gradients.items()}
        if ranks.rank() == 0:
            save_file(tensors, folder / f"{mode}.safetensors")
            (folder / f"{mode}.json").write_text(json.dumps(logs))
        ranks.barrier()


if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    main(Path(sys.argv[1]))
