"""Options of the adapter in a recipe, against PEFT's own and a plain loop over experts."""

import copy
import math
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from moe_finetune.checkpoint import merge_adapter, open_checkpoint
from moe_finetune.checkpoint.adapter import open_adapter
from moe_finetune.checkpoint.verify import verify_merge
from moe_finetune.lora.select import ExpertSelection
from moe_finetune.lora.targets import add_lora
from moe_finetune.moe.hooks import Recorder
from moe_finetune.moe.lora_factors import expert_factors, parameter_wrappers
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.training.full_weights import trained_weights
from moe_finetune.training.save import ordinary_adapter, write_adapter
from tests import tiny
from tests.checkpoint.helpers import load, logits, with_adapter

PARTS = {"attention": {"rank": 2}, "experts": {"rank": 6, "alpha": 21.0}, "router": {"rank": 4}}
EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.save("qwen3_moe", tmp_path_factory.mktemp("base") / "qwen3_moe")


def section(**options) -> LoraSection:
    return LoraSection(**{"rank": 4, "alpha": 12.0, **options})


def adapt(base, lora: LoraSection, router: str = "lora", trained: bool = True):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(7)
        model = add_lora(load(base), lora, router)
    if trained:
        torch.manual_seed(3)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_A" in name or "lora_B" in name:
                    parameter.add_(torch.randn_like(parameter), alpha=0.05)
                elif parameter.requires_grad:
                    parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
    return model.eval()


def save(model, folder):
    config = model.peft_config[model.active_adapter]
    weights, config = ordinary_adapter(model, trained_weights(model), config)
    folder.mkdir()
    write_adapter(config, weights, folder)
    return folder


def same(found, wanted, tolerance=1e-5):
    assert (found - wanted).norm() < tolerance * wanted.norm()


def wrapped(model, parameter: str):
    experts = model.base_model.model.get_submodule(EXPERTS)
    return parameter_wrappers(experts)[1][parameter]


@pytest.mark.parametrize(
    ("options", "router"),
    [
        ({"use_rslora": True}, "lora"),
        ({"parts": PARTS}, "lora"),
        ({"parts": PARTS, "use_rslora": True}, "lora"),
        ({"init": "gaussian"}, "lora"),
        ({"init": "orthogonal"}, "lora"),
        ({"init": "pissa"}, "lora"),
        ({"init": "pissa_niter_8", "use_rslora": True, "parts": PARTS}, "lora"),
        ({"init": "olora"}, "frozen"),
        ({"use_dora": True, "targets": ["attention"], "use_rslora": True}, "full"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_what_is_saved_merges_to_the_logits_of_training(base, options, router, tmp_path):
    """Three that must agree: the model as it trains, PEFT with the saved folder, the merge."""
    model = adapt(base, section(**options), router)
    wanted = logits(model)
    assert (wanted - logits(load(base))).norm() > 0.02 * wanted.norm()
    adapter = save(model, tmp_path / "adapter")
    same(logits(with_adapter(base, adapter)), wanted)
    merge_adapter(base, adapter, tmp_path / "merged")
    same(logits(load(tmp_path / "merged")), wanted)
    with Recorder(model, kernel="grouped"):
        same(logits(model), wanted)
    verify_merge(base, adapter, tmp_path / "merged")


@pytest.mark.parametrize(
    "init", ["kaiming", "gaussian", "orthogonal", "pissa", "pissa_niter_4", "olora"]
)
def test_training_begins_at_the_base(base, init):
    same(logits(adapt(base, section(init=init), trained=False)), logits(load(base)))


def test_scalings_follow_the_part(base):
    """rsLoRA with a rank of each part: alpha / sqrt(rank), by hand."""
    model = adapt(base, section(parts=PARTS, use_rslora=True))
    experts = expert_factors(wrapped(model, "gate_up_proj"), torch.float32)
    assert experts.a_ErI.shape[:2] == (12, 6) and experts.scaling == 21 / math.sqrt(6)
    layers = model.base_model.model.model.layers
    assert layers[0].self_attn.q_proj.scaling["default"] == 6 / math.sqrt(2)  # 12 / 4 x 2
    assert layers[0].mlp.gate.scaling["default"] == 12 / math.sqrt(4)
    assert wrapped(model, "down_proj").r["default"] == 6


@pytest.mark.parametrize("init", ["orthogonal", "pissa", "olora"])
def test_attention_begins_as_in_peft(base, init):
    """The same seed gives PEFT's own factors and residual."""
    ours = adapt(base, section(init=init, targets=["attention"]), "frozen", trained=False)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    theirs = get_peft_model(
        load(base), LoraConfig(r=4, lora_alpha=12, init_lora_weights=init, target_modules=targets)
    )
    for name in ("q_proj", "o_proj"):
        mine, peft = (
            m.base_model.model.model.layers[2].self_attn.get_submodule(name) for m in (ours, theirs)
        )
        products = [
            3 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
            for layer in (mine, peft)
        ]
        same(mine.base_layer.weight, peft.base_layer.weight)
        if init != "orthogonal":  # drawn, and its product is 0
            same(products[0], products[1], 1e-4)


def test_experts_begin_with_their_largest_directions(base):
    """PiSSA of every expert by a singular value decomposition of its own matrix."""
    model = adapt(base, section(init="pissa", use_rslora=True), trained=False)
    plain = load(base).get_submodule(EXPERTS)
    for name in ("gate_up_proj", "down_proj"):
        wrapper = wrapped(model, name)
        factors = expert_factors(wrapper, torch.float32)
        for expert in (0, 5, 11):
            u, s, v = torch.linalg.svd(getattr(plain, name)[expert].detach())
            best = u[:, :4] @ torch.diag(s[:4]) @ v[:4]
            product = factors.scaling * factors.b_EOr[expert] @ factors.a_ErI[expert]
            same(product, best, 1e-4)
            same(wrapper.get_param()[expert], getattr(plain, name)[expert] - best, 1e-4)


def test_orthogonal_experts_differ_and_cancel(base):
    factors = expert_factors(
        wrapped(adapt(base, section(init="orthogonal"), trained=False), "down_proj"), torch.float32
    )
    product = factors.b_EOr @ factors.a_ErI
    assert product.abs().max() < 1e-5 < factors.a_ErI.abs().mean()
    assert (factors.a_ErI[0] - factors.a_ErI[1]).abs().mean() > 1e-3


def test_chosen_experts_alone_become_a_residual(base, tmp_path):
    chosen = {0: [7], 2: [10, 1, 4]}
    ExpertSelection(chosen, num_experts=12).write(tmp_path / "chosen.json")
    lora = section(init="pissa", experts=str(tmp_path / "chosen.json"))
    same(logits(adapt(base, lora, trained=False)), logits(load(base)))
    model, plain = adapt(base, lora), load(base)
    stack = model.base_model.model.get_submodule("model.layers.2.mlp.experts")
    weight = parameter_wrappers(stack)[0].down_proj
    before = plain.get_submodule("model.layers.2.mlp.experts").down_proj
    changed = [e for e in range(12) if not torch.equal(weight[e], before[e])]
    assert changed == [1, 4, 10]
    from moe_finetune.checkpoint import write_metadata

    folder = save(model, tmp_path / "adapter")
    write_metadata(folder, experts=chosen)
    merge_adapter(base, folder, tmp_path / "merged")
    same(logits(load(tmp_path / "merged")), logits(model))


def test_a_residual_in_bfloat16_adds_up_to_the_base(tmp_path):
    base = tiny.save("qwen3_moe", tmp_path / "qwen3_moe")
    model = add_lora(load(base, torch.bfloat16), section(init="pissa"), "frozen")
    plain = load(base, torch.bfloat16).get_submodule(EXPERTS).down_proj.float()
    wrapper = wrapped(model, "down_proj")
    factors = expert_factors(wrapper, torch.float32)
    assert factors.a_ErI.dtype == torch.float32
    whole = wrapper.get_param().float() + factors.scaling * factors.b_EOr @ factors.a_ErI
    assert (whole - plain).abs().max() <= wrapper.get_param().abs().max() * 2**-8


def test_an_adapter_on_the_way_is_not_merged_as_if_it_were_ordinary(base, tmp_path):
    from moe_finetune.errors import AdapterError

    model = adapt(base, section(init="pissa"))
    config = model.peft_config["default"]
    (tmp_path / "on_the_way").mkdir()
    write_adapter(config, trained_weights(model), tmp_path / "on_the_way")
    with pytest.raises(AdapterError, match="pissa"):
        merge_adapter(base, tmp_path / "on_the_way", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    ordinary = save(model, tmp_path / "adapter")
    assert open_adapter(ordinary).rank("model.layers.0.self_attn.q_proj") == 8
    assert config.r == 4  # training goes on with its own


def test_gradients_of_experts_equal_a_plain_loop(base):
    """rsLoRA, a rank of its own: the grouped path against one product an expert."""
    lora = section(parts={"experts": {"rank": 6, "alpha": 21.0}}, use_rslora=True)
    found = {}
    for kernel in ("grouped", "loop"):
        model = adapt(base, copy.deepcopy(lora), "frozen").train()
        with Recorder(model, kernel=kernel):
            logits_of = model(input_ids=tiny.batch()["input_ids"]).logits
            logits_of.float().log_softmax(-1)[..., 5].sum().backward()
        found[kernel] = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    stock = adapt(base, lora, "frozen").train()
    out = stock(input_ids=tiny.batch()["input_ids"]).logits
    out.float().log_softmax(-1)[..., 5].sum().backward()
    for name, parameter in stock.named_parameters():
        if "lora_" in name:
            for kernel in ("grouped", "loop"):
                same(found[kernel][name], parameter.grad, 1e-4)


def test_dora_is_refused_beside_another_adapter(base, tmp_path):
    from moe_finetune.errors import AdapterError

    model = adapt(base, section(use_dora=True, targets=["attention"]), "frozen")
    adapter = save(model, tmp_path / "dora")
    assert any(
        "lora_magnitude_vector" in key for key in load_file(adapter / "adapter_model.safetensors")
    )
    for pairs in ([(adapter, 0.5)], [(adapter, 1.0), (adapter, 1.0)]):
        with pytest.raises(AdapterError, match="use_dora"):
            merge_adapter(base, pairs, tmp_path / "merged")
    assert open_checkpoint(base).tensors  # untouched
