"""Experts pinned to another forward's: against rows without padding, and a slow router."""

import copy
from dataclasses import replace

import pytest
import torch

from moe_finetune.errors import CaptureError
from moe_finetune.lora.targets import add_lora
from moe_finetune.losses.tensors import packed_index
from moe_finetune.moe.choice import pinned_choice
from moe_finetune.moe.choice.loss_free_bias import BiasBalancer
from moe_finetune.moe.choice.pinned_choice import PinsChoice, RecordsChoice, empty_choice
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.recipe.sections import LoraSection
from tests.support import tiny

FAMILIES = ["qwen3_moe", "deepseek_v3"]
LENGTH = 12
PADDED = (0, 3, 1)
ENDED = (0, 2, 0)


def rows_of(vocabulary=260):
    """Ids and mask of three rows with padding on both sides."""
    g = torch.Generator().manual_seed(2)
    ids = torch.randint(4, vocabulary, (3, LENGTH), generator=g)
    places = torch.arange(LENGTH)
    mask = torch.stack(
        [
            (places >= start) & (places < LENGTH - end)
            for start, end in zip(PADDED, ENDED, strict=True)
        ]
    ).long()
    return ids.masked_fill(mask == 0, 3), mask


def run(model, ids, mask):
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits


def chosen_by(model, ids, mask, layers, sizes=(2, 1)):
    """What ``model`` selects, in forwards of some rows each; nobody ran each last place."""
    records = RecordsChoice(mask, layers)
    with torch.no_grad(), Recorder(model) as recorder:
        recorder.change(overrides=records.begin)
        for part, part_mask in zip(ids.split(sizes), mask.split(sizes), strict=True):
            run(model, part, part_mask)
    missing_BS = records.choice.missing_BS.clone()
    missing_BS[:, -1] = True
    return replace(records.choice, missing_BS=missing_BS)


def layers_of(model):
    return [layer.index for layer in Recorder(model).layers]


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
    logits = run(model, rows, mask)
    g = torch.Generator().manual_seed(9)
    weights = torch.randn(logits.shape, generator=g) * mask[..., None]
    weights[:, -1] = 0  # no other forward ran the last token
    return (logits * weights).sum()


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_recorded_is_what_rows_without_padding_choose(family):
    model = policy(family)
    ids, mask = rows_of()
    choice = chosen_by(model, ids, mask, layers_of(model))
    assert choice.index_BSLK.shape == (3, LENGTH, len(layers_of(model)), 3)
    assert choice.index_BSLK.dtype == torch.uint8
    for b in range(3):
        own = mask[b].bool()
        own_LSK = routed(model, ids[b, own])
        for s, index_LK in enumerate(choice.index_BSLK[b, own]):
            assert sets(index_LK) == sets(own_LSK[:, s])
    assert (choice.missing_BS[:, :-1] == (mask[:, :-1] == 0)).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_tokens_train_with_the_pinned_experts(family, checkpointing):
    model = policy(family)
    ids, mask = rows_of()
    layers = layers_of(model)
    choice = chosen_by(model, ids, mask, layers)
    moved(model, seed=5)
    slow = copy.deepcopy(model)
    by_hand = _slow_router(slow, choice, family)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    model.train()
    used = []
    with Recorder(model, observers=[lambda r, _: used.append(r)]) as recorder:
        pins = PinsChoice(choice, mask.bool(), layers)
        recorder.change(overrides=pins.begin)
        loss = loss_of(model, ids, mask)
        loss.backward()
    ran = ~choice.missing_BS
    changed = 0
    for place, record in enumerate(used):
        theirs = sets(choice.index_BSLK[:, :, place][ran])
        assert sets(record.index_TK.view(3, -1, 3)[ran]) == theirs
        own = sets(record.own_index_TK.view(3, -1, 3)[ran])
        changed += sum(a != b for a, b in zip(own, theirs, strict=True))
    # Weights have moved: a router's own choice is another one for some tokens.
    assert pins.compared == len(layers) * ran.sum() and pins.changed == changed
    assert 0.02 < changed / pins.compared < 1
    wanted = loss_of(slow.train(), ids, mask)
    wanted.backward()
    by_hand()
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-3)
    found, expected = gradients(model), gradients(slow)
    assert found.keys() == expected.keys() and any("gate" in name for name in found)
    for name, gradient in expected.items():
        close = 2e-4 * gradient.abs().max().item()
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=close + 1e-7)


def _slow_router(model, choice, family):
    """Make the routers of ``model`` answer with given experts, weighted by a loop over tokens."""
    config = model.get_base_model().config
    recorder = Recorder(model)
    handles = []
    for place, layer in enumerate(recorder.layers):

        def answer(module, args, output, place=place):
            logits, own_weights, own_index = output
            weights, index = [], []
            missing = choice.missing_BS.flatten().tolist()
            pinned = choice.index_BSLK[:, :, place].reshape(-1, 3).tolist()
            for t, chosen in enumerate(pinned):
                if missing[t]:
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
def test_with_equal_weights_a_pin_changes_no_bit(family):
    model = policy(family).train()
    ids, mask = rows_of()
    layers = layers_of(model)
    choice = chosen_by(model, ids, mask, layers)
    with Recorder(model) as recorder:
        plain = loss_of(model, ids, mask)
        pins = PinsChoice(choice, mask.bool(), layers)
        recorder.change(overrides=pins.begin)
        assert torch.equal(loss_of(model, ids, mask), plain)
    assert pins.changed == 0 and pins.compared > 50


def test_forwards_of_some_rows_get_their_own_experts():
    model = policy("qwen3_moe").train()
    ids, mask = rows_of()
    layers = layers_of(model)
    choice = chosen_by(model, ids, mask, layers)
    moved(model, seed=6)
    with Recorder(model) as recorder:
        whole = PinsChoice(choice, mask.bool(), layers)
        recorder.change(overrides=whole.begin)
        loss_of(model, ids, mask)
        parts = PinsChoice(choice, mask.bool(), layers)
        recorder.change(overrides=parts.begin)
        for part in (slice(0, 2), slice(2, 3)):
            loss_of(model, ids[part], mask[part])
        other = PinsChoice(
            replace(choice, index_BSLK=choice.index_BSLK[:, :-1]), mask.bool(), layers
        )
        recorder.change(overrides=other.begin)
        with pytest.raises(CaptureError, match=r"layer 0 .* they belong to other rows"):
            loss_of(model, ids, mask)
    assert whole.changed == parts.changed > 0 and whole.compared == parts.compared


def test_a_choice_is_as_small_as_its_experts_and_leaves_the_device_when_large(monkeypatch):
    mask = torch.ones(2, 5)
    for experts, dtype in ((256, torch.uint8), (257, torch.int16)):
        choice = empty_choice(mask, 3, 4, experts, torch.device("meta"))
        assert choice.index_BSLK.dtype == dtype and choice.index_BSLK.is_meta
        last = packed_index(torch.tensor([experts - 1]), experts)
        assert last.dtype == dtype and last.long() == experts - 1
        assert torch.iinfo(dtype).max >= experts - 1
    monkeypatch.setattr(pinned_choice, "ON_DEVICE", 2 * 5 * 3 * 4)
    on_device = empty_choice(mask, 3, 4, 256, torch.device("meta"))
    on_host = empty_choice(mask, 3, 4, 257, torch.device("meta"))
    assert on_device.index_BSLK.is_meta and on_host.index_BSLK.device.type == "cpu"


def test_a_bias_stays_bounded_where_the_pinned_experts_do_not_follow_it():
    """Rows pinned to experts 0 to 2: no bias changes which experts run."""
    model = tiny.model("deepseek_v3").train()
    ids, mask = rows_of()
    layers = layers_of(model)
    update, steps = 0.05, 60
    balancer = BiasBalancer(tuple(layers), tiny_experts(model), update)
    choice = empty_choice(mask, len(layers), 3, tiny_experts(model), torch.device("cpu"))
    choice.index_BSLK[:] = torch.arange(3)
    used, largest = [], []
    with Recorder(
        model,
        perturbation=balancer,
        observers=[balancer.observe, lambda r, _: used.append(r.index_TK[mask.flatten() == 1])],
    ) as recorder:
        for _ in range(steps):
            recorder.change(overrides=PinsChoice(choice, mask.bool(), layers).begin)
            run(model, ids, mask)
            balancer.step()
            largest.append(max(bias.abs().max().item() for bias in balancer.bias.values()))
    assert all(sorted(row) == [0, 1, 2] for index in used for row in index.tolist())
    # The loads of the pinned experts are the same in each step: +u or -u each time.
    assert max(largest[steps // 2 :]) <= max(largest[: steps // 2]) < 0.5 * steps * update


def tiny_experts(model):
    return model.config.n_routed_experts
