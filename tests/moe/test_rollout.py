"""A rollout's experts in training: against whole rows without a cache, and a slow router."""

import copy

import pytest
import torch

from moe_finetune.errors import CaptureError
from moe_finetune.lora.targets import add_lora
from moe_finetune.moe.hooks import Recorder
from moe_finetune.moe.rollout import NOT_RUN, AgainstRollout, RolloutChoice
from moe_finetune.recipe.sections import LoraSection
from tests import tiny

FAMILIES = ["qwen3_moe", "deepseek_v3"]
LENGTHS, PROMPT, NEW = (7, 4, 6), 7, 5


def prompts():
    """Ids and mask of three prompts of unequal length, padded on the left."""
    g = torch.Generator().manual_seed(2)
    ids = torch.randint(4, 260, (3, PROMPT), generator=g)
    mask = torch.stack([torch.arange(PROMPT) >= PROMPT - n for n in LENGTHS]).long()
    return ids.masked_fill(mask == 0, 3), mask


def rolled_out(model, recorder):
    """A rollout's rows, their mask and experts; the second row has ended before the others."""
    ids, mask = prompts()
    choice = RolloutChoice([layer.index for layer in recorder.layers])
    torch.manual_seed(0)
    with recorder.using(overrides=choice.begin):
        rows = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, max_new_tokens=NEW,
            min_new_tokens=NEW, pad_token_id=3,
        )  # fmt: skip
    mask = torch.cat([mask, torch.ones(3, NEW, dtype=torch.long)], dim=1)
    mask[1, -2:] = 0
    return rows.masked_fill(mask == 0, 3), mask, choice.experts(mask)


def policy(family, **options):
    """A model with an adapter everywhere that is not nothing."""
    lora = LoraSection(rank=3, alpha=6.0)
    return moved(add_lora(tiny.model(family, **options), lora, "full"), seed=4)


def moved(model, seed):
    """``model`` with other trainable weights."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.03 * torch.randn(parameter.shape, generator=g))
    return model


def routed(model, ids):
    """Experts ``(L, S, K)`` of one row without padding or a cache."""
    found = []
    with (
        torch.no_grad(),
        Recorder(model, observers=[lambda r, _: found.append(r.index_TK)], observe="all"),
    ):
        model(input_ids=ids[None], use_cache=False)
    return torch.stack(found)


def sets(index_LK):
    return [set(row) for row in index_LK.tolist()]


def loss_of(model, rows, mask):
    """A number that reads every token's logits, each by a weight of its own."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(
        input_ids=rows, attention_mask=mask, position_ids=positions, use_cache=False
    ).logits
    g = torch.Generator().manual_seed(9)
    weights = torch.randn(logits.shape, generator=g) * mask[..., None]
    weights[:, -1] = 0  # the last token was sampled and not run
    return (logits * weights).sum()


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_noted_is_what_whole_rows_choose(family):
    model = policy(family)
    with Recorder(model) as recorder:
        rows, mask, experts = rolled_out(model, recorder)
    assert experts.shape == (3, PROMPT + NEW, len(recorder.layers), 3)
    for b in range(3):
        own = mask[b].bool()
        ran = experts[b, own]
        own_LSK = routed(model, rows[b, own])
        for s in range(int(own.sum())):
            if int(own.nonzero()[s]) == PROMPT + NEW - 1:
                assert (ran[s] == NOT_RUN).all()
            else:
                assert sets(ran[s]) == sets(own_LSK[:, s])
    assert (experts[mask == 0] == NOT_RUN).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_replay_trains_the_experts_of_the_rollout(family, checkpointing):
    model = policy(family)
    with Recorder(model) as recorder:
        rows, mask, experts = rolled_out(model, recorder)
    moved(model, seed=5)
    slow = copy.deepcopy(model)
    by_hand = _slow_router(slow, rows, experts, family)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    model.train()
    layers = [layer.index for layer in recorder.layers]
    used = []
    with Recorder(model, observers=[lambda r, _: used.append(r.index_TK)]) as recorder:
        free = AgainstRollout(experts, mask.bool(), layers, replay=False)
        recorder.change(overrides=free.begin)
        loss_of(model, rows, mask).backward()
        model.zero_grad()
        used.clear()
        held = AgainstRollout(experts, mask.bool(), layers, replay=True)
        recorder.change(overrides=held.begin)
        loss = loss_of(model, rows, mask)
        loss.backward()
    ran = (experts != NOT_RUN).all(-1)
    for place, index_TK in enumerate(used):
        theirs = experts[:, :, place][ran[:, :, place]]
        assert sets(index_TK.view(3, -1, 3)[ran[:, :, place]]) == sets(theirs)
    # Weights have moved: without a replay, and in a replay's own choice, some experts are others.
    assert 0.02 < float(free.changed / free.compared) < 1
    assert held.compared == free.compared == ran.sum() and 0 < held.changed < held.compared
    wanted = loss_of(slow.train(), rows, mask)
    wanted.backward()
    by_hand()
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-3)
    found, expected = gradients(model), gradients(slow)
    assert found.keys() == expected.keys() and any("gate" in name for name in found)
    for name, gradient in expected.items():
        close = 2e-4 * gradient.abs().max().item()
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=close + 1e-7)


def _slow_router(model, rows, experts, family):
    """Make the routers of ``model`` answer with given experts, weighted by a loop over tokens."""
    config = model.get_base_model().config
    recorder = Recorder(model)
    handles = []
    for place, layer in enumerate(recorder.layers):

        def answer(module, args, output, place=place):
            logits, own_weights, own_index = output
            weights, index = [], []
            for t, chosen in enumerate(experts[:, :, place].reshape(-1, 3).tolist()):
                if NOT_RUN in chosen:
                    weights.append(own_weights[t])
                    index.append(own_index[t].tolist())
                    continue
                row = logits[t].float()
                scores = row.softmax(0) if family == "qwen3_moe" else row.sigmoid()
                picked = [scores[e] for e in chosen]
                scale = 1.0 if family == "qwen3_moe" else config.routed_scaling_factor
                weights.append(torch.stack([p / sum(picked) * scale for p in picked]))
                index.append(chosen)
            return logits, torch.stack(weights), torch.tensor(index)

        handles.append(layer.router.register_forward_hook(answer))
    return lambda: [handle.remove() for handle in handles]


@pytest.mark.parametrize("family", FAMILIES)
def test_with_equal_weights_a_replay_changes_no_bit(family):
    model = policy(family).train()
    with Recorder(model) as recorder:
        rows, mask, experts = rolled_out(model, recorder)
        plain = loss_of(model, rows, mask)
        layers = [layer.index for layer in recorder.layers]
        held = AgainstRollout(experts, mask.bool(), layers, replay=True)
        recorder.change(overrides=held.begin)
        assert torch.equal(loss_of(model, rows, mask), plain)
    assert held.changed == 0 and held.compared > 50


def test_forwards_of_some_rows_meet_their_own_experts():
    model = policy("qwen3_moe").train()
    with Recorder(model) as recorder:
        rows, mask, experts = rolled_out(model, recorder)
        moved(model, seed=6)
        layers = [layer.index for layer in recorder.layers]
        whole = AgainstRollout(experts, mask.bool(), layers, replay=True)
        recorder.change(overrides=whole.begin)
        loss_of(model, rows, mask)
        parts = AgainstRollout(experts, mask.bool(), layers, replay=True)
        recorder.change(overrides=parts.begin)
        for part in (slice(0, 2), slice(2, 3)):
            loss_of(model, rows[part], mask[part])
    assert whole.changed == parts.changed > 0 and whole.compared == parts.compared


def test_rows_that_the_rollout_did_not_run_are_refused():
    model = policy("qwen3_moe")
    with Recorder(model) as recorder:
        rows, mask, experts = rolled_out(model, recorder)
        choice = RolloutChoice([layer.index for layer in recorder.layers])
        recorder.change(overrides=choice.begin)
        with torch.no_grad():
            model(input_ids=rows, attention_mask=mask)
        with pytest.raises(CaptureError, match="12 places of 3 rows, but training has 12 of 2"):
            choice.experts(mask[:2])
        with pytest.raises(CaptureError, match="training has 9 of 3"):
            choice.experts(mask[:, :9])
        against = AgainstRollout(experts[:, :-1], mask[:, :-1].bool(), choice.layers, True)
        recorder.change(overrides=against.begin)
        with pytest.raises(CaptureError, match="the rollout did not run these rows"):
            model(input_ids=rows, attention_mask=mask)
