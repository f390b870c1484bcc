"""Runs a host's own command in this process and notes batches, gradients and losses of its trainer.

``python -m tests.integrations.driver FOLDER MODULE [ARGUMENT ...]`` writes into FOLDER:
``losses.json``, ``gradients.safetensors`` (of the first optimizer step, before any clipping) and
``reference.safetensors`` (of the terms below, from the slow reference loop, at the same weights
and batches).
"""

import copy
import json
import runpy
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Trainer

from tests.support import reference_loop

TERMS = {
    "load_balance": {"weight": 0.3},
    "orthogonality": {"weight": 0.5},
    "variance": {"weight": 0.7},
    "z_loss": {"weight": 0.02},
}
ACCUMULATION = 2
SCALING = 128 / 32


def watch(folder: Path) -> None:
    train, training_step = Trainer.train, Trainer.training_step
    fresh, batches = [], []

    def noted_train(self, *args, **kwargs):
        fresh.append(copy.deepcopy(self.model))
        try:
            return train(self, *args, **kwargs)
        finally:
            rows = [row["loss"] for row in self.state.log_history if "loss" in row]
            (folder / "losses.json").write_text(json.dumps(rows))

    def noted_step(self, model, inputs, *args, **kwargs):
        names = ("input_ids", "attention_mask")
        batches.append({name: inputs[name].clone() for name in names})
        loss = training_step(self, model, inputs, *args, **kwargs)
        if len(batches) == ACCUMULATION:
            grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            save_file(
                {n: g.float().clone() for n, g in grads.items()}, folder / "gradients.safetensors"
            )
            model = fresh.pop()
            for module in model.modules():
                module.gradient_checkpointing = False
            terms = reference_loop.gradients(
                model, batches, TERMS, SCALING, scale=1 / ACCUMULATION, language=False
            )
            save_file(
                {n: g.contiguous() for n, g in terms.items()}, folder / "reference.safetensors"
            )
        return loss

    Trainer.train, Trainer.training_step = noted_train, noted_step


if __name__ == "__main__":
    folder, module = Path(sys.argv[1]), sys.argv[2]
    sys.argv = [module, *sys.argv[3:]]
    folder.mkdir(parents=True, exist_ok=True)
    watch(folder)
    torch.manual_seed(5)  # axolotl draws the adapter before it seeds
    runpy.run_module(module, run_name="__main__", alter_sys=True)
