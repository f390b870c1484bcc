"""The time of completions is predicted before the first step, and predicting changes nothing."""

from types import SimpleNamespace

import pytest
import torch

from moe_finetune.training.stages import generation_time
from moe_finetune.training.stages.generation_time import GenerationTime, generation_line
from tests.support import tiny


def arguments(**changes):
    values = {"use_vllm": False, "world_size": 1, "generation_batch_size": 6}
    values |= {"max_completion_length": 40, "steps_per_generation": 2, "num_iterations": 3}
    return SimpleNamespace(**values | {"gradient_accumulation_steps": 2} | changes)


@pytest.mark.parametrize(
    ("steps", "words"), [(1, "40 tokens a step,"), (3, "every 3 steps,"), (0.5, "2 times a step,")]
)
def test_the_line_has_the_length_and_how_often(steps, words):
    line = generation_line(6, 40, 80.0, steps)
    assert line.startswith("generation: 6 completions of at most 40 tokens") and words in line
    assert "1:20 if all are that long" in line


def test_the_estimate_is_of_all_tokens_and_changes_no_state(monkeypatch, capsys):
    """`at work for 4:19` was all that a run of 64 x 512 tokens wrote before its first step."""
    model = tiny.model("qwen3_moe").train()
    seen = []
    model.register_forward_hook(
        lambda module, args, kwargs, output: seen.append(kwargs["input_ids"].shape),
        with_kwargs=True,
    )
    state = torch.get_rng_state()
    GenerationTime().on_train_begin(arguments(), None, None, model=model)
    assert seen == [(6, 1), (6, 1)] and model.training
    assert torch.equal(state, torch.get_rng_state())
    assert "every 3 steps" in capsys.readouterr().err
    monkeypatch.setattr(generation_time, "seconds_of_a_token", lambda model, rows: 0.5 * rows)
    GenerationTime().on_train_begin(arguments(), None, None, model=model)
    assert "2:00 if all" in capsys.readouterr().err  # 40 tokens of 3 s
    for unmeasured in ({"use_vllm": True}, {"world_size": 2}):
        GenerationTime().on_train_begin(arguments(**unmeasured), None, None, model=model)
    assert capsys.readouterr().err == ""
