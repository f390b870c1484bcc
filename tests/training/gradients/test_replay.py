"""GRPO with the old policy's experts: logged numbers by rows without padding or trainer."""

import pytest
import torch
from transformers import TrainerCallback

from moe_finetune.errors import CaptureError, RecipeError
from moe_finetune.models.family import FAMILIES
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.recipe.schema import recipe_from_tree
from moe_finetune.recipe.yaml_tree import Tree
from moe_finetune.training.save_and_resume.training_state import checkpoints
from moe_finetune.training.stages.grpo_trainer import EXPERTS, MISSING, check_replay
from tests.training.gradients.grpo import TEMPERATURE, student, trainer_for, weights_of

CHANGED = "routing/changed_from_old_policy"
KEYS = ("old_policy/log_prob_difference", "old_policy/kl", "old_policy/ratio_beyond_2")


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
    return taken, torch.stack(found)


def by_hand(model, inputs, before, trained):
    """The three numbers of one micro-batch whose rows had the log-probabilities ``before``."""
    ratios = [
        new - old
        for b, row in enumerate(before)
        for old, new in zip(row, by_row(model, trained, inputs, b)[0], strict=True)
    ]
    log_ratio = torch.tensor(ratios, dtype=torch.float64)
    beyond = (log_ratio.exp() > 2) | (log_ratio.exp() < 0.5)
    numbers = log_ratio.abs(), log_ratio.exp() - 1 - log_ratio, beyond.double()
    return [x.mean().item() for x in numbers]


# Rows of round lengths, and completions that end at tokens below 40.
ODD = {"ends": 40, "pad_to_multiple_of": 5}
# A second rollout, by an adapter that has learned: the reference must not have its experts.
TWICE = {"max_steps": 4}


@pytest.mark.parametrize(
    ("family", "replay", "changes"),
    [("qwen3_moe", "off", ODD), ("deepseek_v3", "old_policy", TWICE),
     ("qwen3_moe", "old_policy", ODD)],
)  # fmt: skip
def test_a_run_is_compared_with_the_old_policy(tmp_path, family, replay, changes):
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
            before = []
            for b in range(len(inputs["prompt_ids"])):
                taken, then_LSK = by_row(model, rolled, inputs, b)
                before.append(taken)
                old = inputs["old_per_token_logps"][b, : len(taken)]
                torch.testing.assert_close(old, torch.tensor(taken), atol=2e-4, rtol=0)
                if replay == "old_policy":
                    ran = ~inputs[MISSING][b]
                    assert ran.sum() == then_LSK.shape[1]
                    recorded = inputs[EXPERTS][b, ran].long().sort(-1).values
                    assert torch.equal(recorded, then_LSK.transpose(0, 1).sort(-1).values)
                with model.disable_adapter():  # the reference chooses for itself
                    free, _ = by_row(model, {}, inputs, b)
                reference = inputs["ref_per_token_logps"][b, : len(taken)]
                torch.testing.assert_close(reference, torch.tensor(free), atol=2e-4, rtol=0)
            wanted.append(by_hand(model, inputs, before, trained))
            if replay == "old_policy":
                ran = ~inputs[MISSING]
                for place in range(inputs[EXPERTS].shape[2]):
                    index = used[place].view(*ran.shape, -1)[ran].sort(-1).values
                    theirs = inputs[EXPERTS][:, :, place][ran].long().sort(-1).values
                    assert torch.equal(index, theirs)
        means = torch.tensor(wanted).mean(0).tolist()
        assert (CHANGED in log) == (replay == "old_policy")
        if step % 2 == 0:  # the weights of the rollout, in float32
            assert log.get(CHANGED, 0) == 0 and log[KEYS[0]] < 1e-5 and abs(log[KEYS[1]]) < 1e-8
            assert log[KEYS[2]] == 0
        elif replay == "old_policy":
            assert log[CHANGED] > 0.05 and log[KEYS[0]] > 0.01
        else:
            assert log[KEYS[0]] > 0.01 and log[KEYS[2]] > 0
            assert [log[key] for key in KEYS] == pytest.approx(means, rel=2e-3)


def test_a_batch_that_is_trained_once_has_no_old_policy(tmp_path):
    options = {"num_iterations": 1, "max_steps": 1}
    with pytest.raises(CaptureError, match=r"router.replay: old_policy: TRL ran no forward"):
        trainer_for(tmp_path, "qwen3_moe", "old_policy", **options).train()
    trainer = trainer_for(tmp_path, "qwen3_moe", "off", **options)
    trainer.train()
    assert not any(KEYS[0] in row for row in trainer.state.log_history)


def asked(**router):
    """A recipe of GRPO with vLLM and a learned bias."""
    tree = {
        "stage": "grpo", "model": {"path": "m"}, "lora": {"rank": 1}, "data": {"train": "t.jsonl"},
        "rewards": ["exact_match"], "trainer": {"use_vllm": True}, "method": "loss_free",
    }  # fmt: skip
    return recipe_from_tree(Tree({**tree, "router": router}))


@pytest.mark.parametrize(
    ("replay", "family", "problem"),
    [
        ("off", "phimoe", None),
        ("old_policy", "qwen3_moe", None),
        ("rollout", "deepseek_v3", None),
        ("old_policy", "phimoe", r"not supported for Phi-3.5-MoE.*SparseMixer"),
        ("rollout", "qwen3_moe", r"no tensor for the learned bias"),
        ("rollout", "deepseek_v2", r"no tensor for the learned bias"),
    ],
)
def test_families_that_cannot_replay_are_refused(replay, family, problem):
    if problem is None:
        check_replay(asked(replay=replay), FAMILIES[family])
        return
    with pytest.raises(RecipeError, match=rf"router.replay: .*{problem}"):
        check_replay(asked(replay=replay), FAMILIES[family])


class Stop(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise RuntimeError("stopped here")


# A rollout serves two steps of two micro-batches each, an epoch has four.
WHOLE = {"logging_steps": 2}
# An epoch is one rollout of three micro-batches, in steps of two micro-batches and of one.
SHORT = {"steps_per_generation": 3, "num_iterations": 1}


@pytest.mark.parametrize(
    ("stop", "replay", "changes", "saved"),
    [
        (6, "old_policy", WHOLE, 2 * 4),
        (5, "off", WHOLE, 2 * 4),
        (5, "old_policy", SHORT, 3 * 2),
        pytest.param(5, "off", SHORT, 3 * 2, marks=pytest.mark.release),
    ],
)
def test_a_run_stopped_inside_a_generation_batch_ends_like_the_straight_one(
    tmp_path, stop, replay, changes, saved
):
    """Saves wait for a rollout's end."""
    options = {"max_steps": 7, "save_strategy": "steps", "save_steps": 1, **changes}
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
    for one, two in zip(straight.seen[saved:], resumed.seen, strict=True):
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
