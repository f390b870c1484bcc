"""DenseMixer's router gradient against the dense form, written slowly around the stock classes."""

import pytest
import torch

from moe_finetune.checkpoint.load_model import load_model
from moe_finetune.errors import CaptureError, RecipeError
from moe_finetune.lora.select import ExpertSelection
from moe_finetune.losses.record import scores_of
from moe_finetune.models import FAMILIES
from moe_finetune.moe.experts.dense_router import DenseRouter, DenseScores, Draws, check_dense
from moe_finetune.moe.experts.forward import run_experts
from moe_finetune.moe.layers import model_facts, moe_layers, stacks
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.moe.recorder.layer_hooks import LayerVisits
from moe_finetune.moe.recorder.router_results import named_results
from moe_finetune.quantization.weight import quantized
from moe_finetune.recipe.method import resolve_method
from moe_finetune.recipe.sections import LoraSection
from tests.support import tiny, tiny_families
from tests.support.tiny_adapter import LORA, adapted

NAMES = sorted(FAMILIES)
SINGLE = ("granitemoe_swa", "inkling2", "inkling2_text")
"""Their classes compute in float32 whatever the model's dtype."""
ROUNDED = 5e-6
"""Scores are float32 in the classes, also of a model in float64."""
REFUSED = ("gemma4", "gemma4_text", "phimoe")
SUPPORTED = [name for name in NAMES if name not in REFUSED]


def made(name, lora=LORA):
    maker = tiny if name in tiny.FAMILY_NAMES else tiny_families
    model = maker.model(name)
    model.set_experts_implementation("eager")
    model = adapted(model, "full", lora)
    model = model if name in SINGLE else model.double()
    model.get_input_embeddings().weight.requires_grad_(True)
    return model.train()


class DenseForm:
    """``y + sum_j (w_j - w_j as a constant) E_j(x)`` over unselected j, with E_j as a constant.

    The value is the stock one. c / N is what the class's own weights are of its scores.
    """

    def __init__(self, model, keep=lambda selected_TE: ~selected_TE, factor=1.0):
        self.keep, self.factor, self.hooks = keep, factor, []
        fixed = model_facts(model).fixed_layers
        for layer in moe_layers(model):
            if layer.index not in fixed:
                self.watch(layer)

    def watch(self, layer):
        seen, busy = {}, []

        def note(module, args, output):
            outputs = output if isinstance(output, tuple) else (output,)
            found = named_results(layer.family.router_returns, outputs, layer.places.num_experts)
            if "logits" in found:
                seen["logits"] = found["logits"]

        def add(module, args, output):
            if busy:
                return output
            busy.append(True)
            x_TH, index_TK, weights_TK = args
            score = layer.family.score
            s_TE = scores_of(seen["logits"].to(output.dtype), score)
            chosen_T = s_TE.gather(1, index_TK).sum(1)
            w_TE = s_TE * (weights_TK.sum(1) / chosen_T).detach()[:, None]
            selected_TE = torch.zeros_like(s_TE, dtype=torch.bool).scatter_(1, index_TK, True)
            kept_TE = self.keep(selected_TE)
            for j in range(s_TE.shape[1]):
                with torch.no_grad():
                    one = torch.full_like(index_TK[:, :1], j)
                    y_TH = module(x_TH, one, torch.ones_like(weights_TK[:, :1]))
                w_T1 = torch.where(kept_TE[:, j], w_TE[:, j] * self.factor, 0.0)[:, None]
                output = output + (w_T1 - w_T1.detach()) * y_TH
            busy.clear()
            return output

        self.hooks.append(layer.router.register_forward_hook(note))
        path = layer.family.router_logits
        if path:
            head = layer.router.get_submodule(path)
            self.hooks.append(head.register_forward_hook(lambda m, a, out: seen.update(logits=out)))
        self.hooks.append(layer.outer_experts.register_forward_hook(add))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()


def ids():
    return torch.randint(4, 260, (2, 13), generator=torch.Generator().manual_seed(5))


def run(model, around, **options):
    model.zero_grad()
    vocabulary = model.config.get_text_config().vocab_size
    pull = torch.randn(2, 13, vocabulary, generator=torch.Generator().manual_seed(8))
    with around:
        logits = model(input_ids=ids(), use_cache=False, **options).logits
        (logits * pull.to(logits.dtype)).sum().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), grads


def worst(found, wanted):
    assert found.keys() == wanted.keys() and len(found) > 10
    return max(
        float((found[n] - g).abs().max() / g.abs().max().clamp_min(1e-6)) for n, g in wanted.items()
    )


def recorder(model, sample=None, **options):
    made = Recorder(model, **options)
    made.change(dense_router=DenseRouter(sample))
    return made


@pytest.mark.parametrize("name", SUPPORTED)
def test_the_gradient_is_that_of_the_dense_form(name):
    model = made(name)
    plain, selected = run(model, Recorder(model))
    _, wanted = run(model, DenseForm(model))
    values, found = run(model, recorder(model))
    assert torch.equal(values, plain)
    assert worst(found, wanted) < (2e-4 if name in SINGLE else ROUNDED)
    assert worst(selected, wanted) > 1e-2, "dense and selected are the same"


@pytest.mark.parametrize("name", REFUSED)
def test_weights_that_are_no_scores_are_refused(name):
    model = tiny_families.model(name)
    with pytest.raises(CaptureError, match="router_gradient: dense"):
        check_dense(FAMILIES[name], model_facts(model), None)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_the_mean_over_draws_is_the_full_gradient(name):
    """4,000 draws of one layer's scalars, 500 at a time; each is within its standard error."""
    torch.manual_seed(2)
    layer = moe_layers(made(name))[-1]
    experts, hidden = layer.places.num_experts, stacks(layer.experts)[1].shape[1]
    x_TH = torch.randn(7, hidden, dtype=torch.float64)
    index_TK = torch.rand(7, experts).argsort(1)[:, :3]
    pull_TH = torch.randn(7, hidden, dtype=torch.float64)

    def gradients(copies, sample, key=()):
        """Gradients of the scores (copies, T, E), each copy of the tokens with its own draws."""
        tokens = 7 * copies
        weights_TE = torch.rand(tokens, experts, dtype=torch.float64, requires_grad=True)
        stacks = LayerVisits(layer, [layer])._stacks(layer.experts)
        dense = DenseScores(weights_TE, Draws(sample, key))
        weights_TK = torch.rand(tokens, 3).double()
        x, index = x_TH.repeat(copies, 1), index_TK.repeat(copies, 1)
        out = run_experts(x, index, weights_TK, stacks, dense=dense).out_TH
        (out * pull_TH.repeat(copies, 1)).sum().backward()
        return weights_TE.grad.unflatten(0, (copies, 7))

    (full_TE,), sample = gradients(1, None), 2
    assert not full_TE.gather(1, index_TK).any() and (full_TE != 0).sum() == 7 * (experts - 3)
    draws = torch.cat([gradients(500, sample, (n,)) for n in range(8)])
    assert ((draws != 0).sum(-1) == sample).all()
    error_TE = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - full_TE).abs() <= 4.5 * error_TE + 1e-12).all()
    assert torch.equal(gradients(500, sample, (5,)), draws[2500:3000]), "a key repeats its draws"
    assert not torch.equal(draws[2500:3000], draws[3000:3500])


def test_all_experts_drawn_is_the_full_form():
    model = made("qwen3_moe")
    facts = model_facts(model)
    _, full = run(model, recorder(model))
    _, drawn = run(model, recorder(model, facts.num_experts - facts.top_k))
    assert worst(drawn, full) < 1e-9
    with pytest.raises(CaptureError, match=r"dense_sample: .* give 1 to"):
        check_dense(FAMILIES["qwen3_moe"], facts, facts.num_experts)


def test_with_every_expert_selected_nothing_changes():
    model = adapted(tiny.model("qwen3_moe", num_experts_per_tok=12)).double().train()
    model.get_input_embeddings().weight.requires_grad_(True)
    assert model_facts(model).num_experts == 12
    _, selected = run(model, Recorder(model))
    _, dense = run(model, recorder(model))
    assert worst(dense, selected) == 0.0


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h"])
@pytest.mark.parametrize("sample", [None, 2])
def test_layers_that_run_again_draw_the_same(name, sample):
    model = made(name)
    _, wanted = run(model, recorder(model, sample))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    _, found = run(model, recorder(model, sample))
    assert worst(found, wanted) < 1e-9


@pytest.mark.parametrize("kernel", ["loop", "grouped"])
def test_both_kernels(kernel):
    model = made("qwen3_moe").float()
    _, wanted = run(model, DenseForm(model))
    _, found = run(model, recorder(model, kernel=kernel))
    assert worst(found, wanted) < 1e-3


def test_packed_and_padded_rows():
    """A sequence's gradients depend neither on its row's others nor on padding."""
    model = made("qwen3_moe")
    first, second = ids()
    layouts = {
        "packed": (torch.cat([first, second[:9]])[None], {"position_ids": [*range(13), *range(9)]}),
        "padded": (torch.stack([first, torch.cat([second[:9], torch.full((4,), 3)])]), {}),
    }
    pull = torch.randn(22, model.config.vocab_size, generator=torch.Generator().manual_seed(8))
    gradients = {}
    for layout, (tokens, given) in layouts.items():
        model.zero_grad()
        kwargs = {n: torch.tensor(v)[None] for n, v in given.items()}
        if layout == "padded":
            kwargs["attention_mask"] = (torch.arange(13) < torch.tensor([[13], [9]])).long()
        with recorder(model):
            logits = model(input_ids=tokens, use_cache=False, **kwargs).logits
            rows = logits[0] if layout == "packed" else torch.cat([logits[0], logits[1, :9]])
            (rows * pull.double()).sum().backward()
        gradients[layout] = {
            n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
        }
    assert worst(gradients["packed"], gradients["padded"]) < ROUNDED


def test_experts_that_were_not_chosen_count(tmp_path):
    """ESFT: factors on chosen experts; the others' outputs are the base's."""
    file, chosen = tmp_path / "experts.json", {0: [1, 4], 1: [0], 2: [2, 7, 9]}
    ExpertSelection(chosen, num_experts=12).write(file)
    model = made("qwen3_moe", LoraSection(rank=4, alpha=12.0, experts=str(file)))
    _, wanted = run(model, DenseForm(model))
    _, found = run(model, recorder(model))
    assert worst(found, wanted) < ROUNDED


def test_quantized_experts(tmp_path):
    """nf4: the gradient is that of the values that the codes stand for."""
    tiny.model("qwen3_moe").save_pretrained(tmp_path)
    packed = adapted(load_model(tmp_path, dtype="float32", quantization="nf4")).train()
    floats = adapted(tiny.model("qwen3_moe")).train()
    values = dict(packed.named_parameters())
    with torch.no_grad():
        for name, parameter in floats.named_parameters():
            stored = values[name]
            parameter.copy_(stored.dequantize() if quantized(stored) else stored)
    _, wanted = run(floats, recorder(floats))
    _, found = run(packed, recorder(packed))
    assert worst(found, wanted) < 1e-3


def test_nothing_in_eval_mode_and_without_gradients():
    model = made("qwen3_moe")
    _, selected = run(model.eval(), Recorder(model))
    _, found = run(model, recorder(model))
    assert worst(found, selected) == 0.0


def test_a_draw_goes_with_the_preset_and_not_without():
    method = resolve_method("densemixer", dense_sample=2)
    assert (method.router_gradient, method.dense_sample) == ("dense", 2)
    assert method.trains_routers and resolve_method(method) == method
    with pytest.raises(RecipeError, match="dense_sample: needs"):
        resolve_method("none", dense_sample=2)
