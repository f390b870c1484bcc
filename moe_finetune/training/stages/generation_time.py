"""An estimate of how long completions take, before the first of them is made."""

import time
from typing import Any

import torch
from transformers import TrainerCallback

from moe_finetune.io.counted import counted
from moe_finetune.io.terminal import duration, terminal
from moe_finetune.moe.layers import in_mode
from moe_finetune.training.save_and_resume.state_files import random_state, set_random_state


class GenerationTime(TrainerCallback):
    """Measures one token of a generation batch, and reports what all its tokens would take.

    For GRPO's own generation in one process: with vLLM it takes less, and under FSDP2 a forward
    needs all ranks.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **events: Any) -> None:
        """Report the estimate."""
        if args.use_vllm or args.world_size > 1:
            return
        rows = args.generation_batch_size
        seconds = seconds_of_a_token(events["model"], rows) * args.max_completion_length
        steps = args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps
        terminal().say(generation_line(rows, args.max_completion_length, seconds, steps))


def seconds_of_a_token(model: Any, rows: int) -> float:
    """The seconds of a forward of one token for each row, which leaves random states unchanged."""
    parameter = next(model.parameters())
    ids = torch.zeros(rows, 1, dtype=torch.long, device=parameter.device)
    states = random_state()
    with torch.no_grad(), in_mode(model, False):
        for _ in range(2):  # the first one also sets up kernels
            started = time.perf_counter()
            model(input_ids=ids)
            if parameter.is_cuda:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started
    set_random_state(states)
    return seconds


def generation_line(rows: int, tokens: int, seconds: float, steps: float) -> str:
    """The estimate in words; ``seconds``: of a generation that ``steps`` steps train on."""
    share = f"every {steps:g} steps" if steps > 1 else f"{1 / steps:g} times a step"
    often = "a step" if steps == 1 else share
    return (
        f"generation: {counted(rows, 'completion')} of at most {counted(tokens, 'token')} {often}, "
        f"about {duration(seconds)} if all are that long (measured on one token, without "
        "training); fewer: trainer.max_completion_length, trainer.gradient_accumulation_steps"
    )
