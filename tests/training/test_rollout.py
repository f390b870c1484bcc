"""GRPO against its rollouts: every logged number by rows without padding, cache or trainer."""

import pytest
import torch
from transformers import TrainerCallback

from moe_finetune.errors import CaptureError, RecipeError
from moe_finetune.models.base import FAMILIES
from moe_finetune.moe.hooks import Recorder
from moe_finetune.moe.rollout import NOT_RUN
from moe_finetune.training.checkpoint import checkpoints
from moe_finetune.training.grpo import EXPERTS, check_replay
from tests.training.grpo import TEMPERATURE, student, trainer_for, weights_of

KEYS = ("routing/changed_from_rollout", "rollout/log_prob_difference", "rollout/kl")


def by_row(model, weights, inputs, b):
    """Log-probabilities of a row's completion, and its experts (L, S, K)."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])
    prompt = inputs["prompt_ids"][b][inputs["prompt_mask"][b].bool()]
    completion = inputs["completion_ids"][b][inputs["completion_mask"][b].bool()]
    ids, found = torch.cat([prompt, completion]), []
    with (
        torch.no_grad(),
        Recorder(model, observers=[lambda r, _: found.append(r.index_TK)], observe="all"),
    ):
        logits = model(input_ids=ids[None], use_cache=False).logits[0] / TEMPERATURE
    logs = logits.log_softmax(-1)
    start = len(prompt) - 1
    taken = [float(logs[start + i, token]) for i, token in enumerate(completion.tolist())]
    return taken, torch.stack(found), len(prompt)


def by_hand(model, inputs, rolled, trained):
    """The three numbers of one micro-batch, and what the rollout's tokens had."""
    changed, differences, divergences, rows = [], [], [], []
    for b in range(len(inputs["prompt_ids"])):
        before, then_LSK, start = by_row(model, rolled, inputs, b)
        after, now_LSK, _ = by_row(model, trained, inputs, b)
        left = int((inputs["prompt_mask"][b] == 0).sum())
        for s in range(start, then_LSK.shape[1]):
            noted = inputs[EXPERTS][b, left + s]
            if (noted == NOT_RUN).all():
                continue
            for place, noted_K in enumerate(noted.tolist()):
                assert set(noted_K) == set(then_LSK[place, s].tolist())
                changed.append(set(noted_K) != set(now_LSK[place, s].tolist()))
        for old, new in zip(before, after, strict=True):
            ratio = torch.tensor(new - old, dtype=torch.float64)
            differences.append(abs(new - old))
            divergences.append(float(ratio.exp() - 1 - ratio))
        rows.append(before)
    return [sum(x) / len(x) for x in (changed, differences, divergences)], rows


# Prompts that run in parts, rows of round lengths, and completions that end at tokens below 40.
ODD = {"ends": 40, "pad_to_multiple_of": 5, "generation_kwargs": {"prefill_chunk_size": 3}}
# A second rollout, by an adapter that has learned: the reference must not have its experts.
TWICE = {"max_steps": 4}


@pytest.mark.parametrize(
    ("family", "replay", "changes"),
    [("qwen3_moe", False, {}), ("deepseek_v3", True, TWICE), ("qwen3_moe", False, ODD)],
)
def test_a_run_is_compared_with_its_rollouts(tmp_path, family, replay, changes):
    trainer = trainer_for(tmp_path, family, replay, **changes)
    trainer.train()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    model = student(family).eval()
    steps = [trainer.seen[i : i + 2] for i in range(0, len(trainer.seen), 2)]
    assert len(steps) == changes.get("max_steps", 2)
    lengths = {int(n) for inputs, *_ in trainer.seen for n in inputs["completion_mask"].sum(1)}
    assert len(lengths) > 2 if changes is ODD else lengths == {6}
    for step, (log, batches) in enumerate(zip(logs, steps, strict=True)):
        wanted = []
        for inputs, rolled, trained, used in batches:
            numbers, before = by_hand(model, inputs, rolled, trained)
            wanted.append(numbers)
            for b, row in enumerate(before):
                sampled = inputs["sampling_per_token_logps"][b, : len(row)]
                torch.testing.assert_close(sampled, torch.tensor(row), atol=2e-4, rtol=0)
                old = inputs["old_per_token_logps"][b, : len(row)]
                torch.testing.assert_close(old, sampled, atol=2e-4, rtol=0)
                with model.disable_adapter():  # the reference chooses for itself
                    free, *_ = by_row(model, {}, inputs, b)
                reference = inputs["ref_per_token_logps"][b, : len(row)]
                torch.testing.assert_close(reference, torch.tensor(free), atol=2e-4, rtol=0)
            if replay:
                ran = (inputs[EXPERTS] != NOT_RUN).all(-1)
                assert ran[..., 0].sum() > 20
                for place, index_TK in enumerate(used[: ran.shape[-1]]):
                    index = index_TK.view(*ran.shape[:2], -1)[ran[..., place]].sort(-1).values
                    theirs = inputs[EXPERTS][:, :, place][ran[..., place]].sort(-1).values
                    assert torch.equal(index, theirs.to(index.dtype))
        means = torch.tensor(wanted).mean(0).tolist()
        if step % 2 == 0:  # the weights of the rollout, in float32
            assert log[KEYS[0]] == 0 and 0 < log[KEYS[1]] < 1e-4 and abs(log[KEYS[2]]) < 1e-8
        elif replay:
            assert log[KEYS[0]] > 0.05
        else:
            assert log[KEYS[0]] > 0.05 and log[KEYS[1]] > 0.01
            assert [log[key] for key in KEYS] == pytest.approx(means, rel=2e-3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_beams": 2}, "trainer.generation_kwargs select beam"),
        ({"use_cache": False}, "trainer.generation_kwargs.use_cache is false"),
    ],
)
def test_what_does_not_sample_token_by_token_is_refused_or_said(tmp_path, caplog, changes, said):
    options = {"generation_kwargs": changes, "num_iterations": 1, "max_steps": 1}
    with pytest.raises(CaptureError, match=f"router.replay: {said}"):
        trainer_for(tmp_path, "qwen3_moe", True, **options).train()
    trainer = trainer_for(tmp_path, "qwen3_moe", False, **options)
    trainer.train()
    assert caplog.text.count(f"routing/changed_from_rollout is not logged: {said}") == 1
    assert not any(KEYS[0] in row for row in trainer.state.log_history)


def test_a_family_with_weights_of_its_own_is_refused():
    check_replay(FAMILIES["deepseek_v3"])
    with pytest.raises(
        RecipeError, match=r"router.replay: not supported for Phi-3.5-MoE.*SparseMixer"
    ):
        check_replay(FAMILIES["phimoe"])


class Stop(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise RuntimeError("stopped here")


@pytest.mark.parametrize(("stop", "replay"), [(6, True), (5, False)])
def test_a_run_stopped_inside_a_generation_batch_ends_like_the_straight_one(tmp_path, stop, replay):
    """A rollout serves two steps, an epoch has four; saves wait for a rollout's end."""
    options = {"max_steps": 7, "save_strategy": "steps", "save_steps": 1, "logging_steps": 2}
    straight = trainer_for(tmp_path / "a", "qwen3_moe", replay, **options)
    straight.train()
    stopped = trainer_for(tmp_path / "b", "qwen3_moe", replay, **options)
    stopped.add_callback(Stop(stop))
    with pytest.raises(RuntimeError, match="stopped here"):
        stopped.train()
    assert [p.name for p in checkpoints(tmp_path / "b")] == ["checkpoint-4", "checkpoint-2"]
    resumed = trainer_for(tmp_path / "b", "qwen3_moe", replay, **options)
    torch.manual_seed(99)
    resumed.train(resume_from_checkpoint=True)
    wanted, got = weights_of(straight.model), weights_of(resumed.model)
    for name, value in wanted.items():
        assert torch.equal(value, got[name]), name
    for one, two in zip(straight.seen[2 * 4 :], resumed.seen, strict=True):
        assert torch.equal(one[0]["completion_ids"], two[0]["completion_ids"])
        assert torch.equal(one[0]["advantages"], two[0]["advantages"])
    timed = ("runtime", "per_second", "step_time")
    rows = [
        [{k: v for k, v in row.items() if not any(t in k for t in timed)} for row in history]
        for history in (straight.state.log_history, resumed.state.log_history)
    ]
    (*rows_straight, end), (*rows_resumed, resumed_end) = rows
    assert rows_straight == rows_resumed
    assert resumed_end["train_loss"] == pytest.approx(end["train_loss"], rel=1e-9)
