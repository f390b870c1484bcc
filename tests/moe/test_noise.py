"""Training noise: its distribution, its absence outside training, and its gradients."""

import pytest
import torch

from moe_finetune.lora.targets import add_lora
from moe_finetune.moe.choice.noise import TrainingNoise, drops_second_choice
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.recipe.method import Perturbations
from moe_finetune.recipe.sections import LoraSection
from tests.support import tiny

ALL = Perturbations(jitter=0.01, expert_dropout=0.4, random_second_choice=True)


def test_only_the_second_best_is_dropped_and_as_often_as_it_should_be():
    torch.manual_seed(0)
    logits = torch.randn(5, 9) * 2
    index = logits.topk(3, sorted=False).indices[:, [2, 0, 1]]
    repeats = 4000
    many = [tensor.repeat(repeats, 1) for tensor in (logits, index)]
    kept = (~drops_second_choice(*many, "softmax")).view(repeats, 5, 3).sum(0)
    for t in range(5):
        ranked = sorted(range(3), key=lambda k: -logits[t, index[t, k]].item())
        best, second, third = ranked
        assert kept[t, best] == kept[t, third] == repeats
        g1, g2 = (logits[t, index[t, k]].exp().item() for k in (best, second))
        chance = min(1.0, 2 * g2 / (g1 + g2))
        assert kept[t, second].item() / repeats == pytest.approx(chance, abs=0.04)


def test_a_sigmoid_router_drops_by_its_own_scores():
    """Logits 6 and 4: scores 0.9975 and 0.9820, so that the second is nearly always kept."""
    torch.manual_seed(0)
    logits, index = torch.tensor([[4.0, 6.0, -9.0]]).repeat(4000, 1), torch.tensor([[0, 1]])
    for score, chance in (("sigmoid", 0.992), ("softmax", 0.238)):
        dropped = drops_second_choice(logits, index.repeat(4000, 1), score)[:, 0]
        assert 1 - dropped.float().mean().item() == pytest.approx(chance, abs=0.02)


def test_noise_acts_in_training_alone():
    model = add_lora(tiny.model("qwen3_moe"), LoraSection(rank=4, alpha=8.0), "full")
    batch = tiny.batch()
    model.eval()
    with torch.no_grad():
        quiet = model(**batch).logits
        with Recorder(model, perturbation=TrainingNoise(ALL)):
            assert torch.allclose(model(**batch).logits, quiet, atol=1e-5)
    model.train()
    with Recorder(model, perturbation=TrainingNoise(ALL)):
        first = model(**batch).logits.detach()
        second = model(**batch).logits.detach()
    assert (first - quiet).abs().max() > 1e-3
    assert (first - second).abs().max() > 1e-3


@pytest.mark.parametrize(
    "options",
    [
        Perturbations(jitter=0.05),
        Perturbations(expert_dropout=0.4),
        Perturbations(random_second_choice=True),
    ],
)
def test_a_checkpointed_layer_draws_the_same_again(options):
    model = add_lora(tiny.model("deepseek_v2"), LoraSection(rank=4, alpha=8.0), "full").train()
    batch, grads = tiny.batch(), []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        model.zero_grad()
        torch.manual_seed(7)
        with Recorder(model, perturbation=TrainingNoise(options)):
            model(**batch).loss.backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    for name, value in grads[0].items():
        assert torch.allclose(grads[1][name], value, atol=1e-6 + 1e-5 * value.abs().max()), name


def test_jitter_multiplies_the_routers_input_and_nothing_else():
    model = tiny.model("mixtral").train()
    noise, inputs = TrainingNoise(Perturbations(jitter=0.1)), []
    records = []
    with Recorder(model, perturbation=noise, observers=[lambda r, _: records.append(r)]):
        router = model.model.layers[0].mlp.gate
        hook = router.register_forward_hook(lambda m, a, o: inputs.append(a[0].detach()))
        model(**tiny.batch())
        hook.remove()
    ratio = (inputs[0] / records[0].inputs_TH)[records[0].inputs_TH.abs() > 1e-3]
    assert 0.9 <= ratio.min() < 0.92 and 1.08 < ratio.max() <= 1.1
