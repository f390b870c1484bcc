"""A GRPO trainer of a tiny model that keeps what it trained on."""

import torch
from datasets import Dataset

from moe_finetune.lora.targets import add_lora
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.recipe.stages import STAGES
from moe_finetune.training.callback.callback import SpecializationCallback
from moe_finetune.training.run.trainer import trainer_of
from tests.support import tiny

TEMPERATURE = 0.8


def student(family):
    torch.manual_seed(1)
    return add_lora(tiny.model(family), LoraSection(rank=3, alpha=6.0), "full").train()


def letters(completions, **_):
    return [sum(c.isascii() and c.isalpha() for c in text) / 9 for text in completions]


def weights_of(model):
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def trainer_for(folder, family, replay, ends=1, **changes):
    """A trainer whose ``seen`` has each micro-batch, the weights, and the experts used."""
    stage = STAGES["grpo"]
    options = {
        "output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": [], "seed": 3,
        "max_steps": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "num_iterations": 2, "num_generations": 4, "max_completion_length": 6, "beta": 0.05,
        "temperature": TEMPERATURE, "learning_rate": 2e-2, "lr_scheduler_type": "constant",
        "logging_steps": 1, "save_strategy": "no", "max_grad_norm": 0.0,
        "router_aux_loss_coef": 0.0, "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }  # fmt: skip
    args = stage.config_class()(**{**options, **changes})
    prompts = Dataset.from_list([{"prompt": p} for p in ("a", "abcdefg", "wxyz", "qq")])
    model = student(family)
    model.generation_config.eos_token_id = list(range(ends))
    trainer = trainer_of(stage)(
        model=model, args=args, train_dataset=prompts, reward_funcs=letters,
        processing_class=tiny.tokenizer(),
    )  # fmt: skip
    trainer.callback = callback = SpecializationCallback("none")
    trainer.add_callback(callback)
    callback.attach(trainer)
    trainer.replay = replay
    trainer.seen, compute, generate = [], trainer._compute_loss, trainer._generate
    rolled = {}

    def at_rollout(*given):
        rolled.update(weights_of(model))
        return generate(*given)

    def at_loss(model_, inputs):
        used = []
        recorder = callback.specialization.recorder
        observers = (*recorder.plan.observers, lambda record, _: used.append(record.index_TK))
        with recorder.using(observers=observers):
            loss = compute(model_, inputs)
        trainer.seen.append((inputs, dict(rolled), weights_of(model), used))
        return loss

    trainer._compute_loss, trainer._generate = at_loss, at_rollout
    return trainer
