"""Options of the adapter in a recipe, against PEFT's own and a plain loop over experts."""

import copy
import json
import math
import re
import warnings

import pytest
import torch

from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.checkpoint.verify import verify_merge
from moe_finetune.errors import RecipeError
from moe_finetune.lora.targets import adapts, add_lora, lora_config
from moe_finetune.moe.experts.lora_factors import expert_factors, parameter_wrappers
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.training.save_and_resume.gathered_weights import trained_weights
from moe_finetune.training.save_and_resume.save_trained import write_adapter
from tests.checkpoint.helpers import load, logits, with_adapter
from tests.support import tiny
from tests.support.tables import with_more

PARTS = {"attention": {"rank": 2}, "experts": {"rank": 6, "alpha": 21.0}, "router": {"rank": 4}}
EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.save("qwen3_moe", tmp_path_factory.mktemp("base") / "qwen3_moe")


def section(**options) -> LoraSection:
    return LoraSection(**{"rank": 4, "alpha": 12.0, **options})


def adapt(base, lora, router: str = "lora", trained: bool = True, router_layers="all"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(7)
        model = add_lora(load(base), lora, router, router_layers)
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
    folder.mkdir()
    write_adapter(config, trained_weights(model), folder)
    return folder


def same(found, wanted, tolerance=1e-5):
    assert (found - wanted).norm() < tolerance * wanted.norm()


def wrapped(model, parameter: str):
    experts = model.base_model.model.get_submodule(EXPERTS)
    return parameter_wrappers(experts)[1][parameter]


@pytest.mark.more
@pytest.mark.parametrize(
    ("options", "router"),
    with_more(
        [({"parts": PARTS, "use_rslora": True}, "lora")],
        [
            ({"use_rslora": True}, "lora"),
            ({"parts": PARTS}, "lora"),
            ({"init": "gaussian"}, "lora"),
            ({"use_rslora": True, "targets": ["attention"]}, "full"),
        ],
    ),
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
    ("targets", "router"),
    with_more([([], "full"), (["attention"], "lora")], [(["attention"], "full"), ([], "lora")]),
)
@pytest.mark.parametrize(
    ("layers", "expected"), with_more([([0, -1], {0, 2})], [([-1], {2}), ("all", {0, 1, 2})])
)
def test_routers_train_in_the_layers_that_are_named(tmp_path, targets, router, layers, expected):
    base = tiny.save("qwen3_moe", tmp_path / "base")
    model = adapt(base, section(targets=targets), router, router_layers=layers)
    trained = {name for name, p in model.named_parameters() if p.requires_grad and ".gate." in name}
    assert {int(re.search(r"layers\.(\d+)\.", name)[1]) for name in trained} == expected
    start = dict(load(base).named_parameters())
    if adapts(section(targets=targets), router):
        adapter = save(model, tmp_path / "adapter")
        merge_adapter(base, adapter, tmp_path / "merged")
        same(logits(load(tmp_path / "merged")), logits(model))
        model = load(tmp_path / "merged")
    changed = {
        int(name.split(".")[2])
        for name, value in model.named_parameters()
        if name.endswith("mlp.gate.weight") and not torch.equal(value.float(), start[name].float())
    }
    assert changed == expected


@pytest.mark.parametrize("layers", [[3], [-4], [0, 7]])
def test_a_router_of_no_layer_is_refused(base, layers):
    with pytest.raises(
        RecipeError, match=r"router\.layers: -?\d is not a MoE layer.*-1 is the last"
    ):
        add_lora(load(base), section(), "full", layers)


@pytest.mark.parametrize("init", ["kaiming", "gaussian"])
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


@pytest.mark.parametrize(("rank", "alpha", "expected"), [(20, None, 6), (5, None, 4), (20, 7.0, 6)])
def test_experts_rank_auto_is_the_rank_over_top_k(base, rank, alpha, expected):
    """Three experts per token: rank // 3, at least 4; alpha keeps the section's ratio of 3."""
    part = {"rank": "auto"} if alpha is None else {"rank": "auto", "alpha": alpha}
    model = adapt(base, section(rank=rank, alpha=3.0 * rank, parts={"experts": part}))
    for name in ("gate_up_proj", "down_proj"):
        assert wrapped(model, name).r["default"] == expected
        scaling = wrapped(model, name).scaling["default"]
        assert scaling == (3.0 if alpha is None else alpha / expected)
    attention = model.base_model.model.model.layers[0].self_attn.q_proj
    assert attention.r["default"] == rank and attention.scaling["default"] == 3.0


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


def test_the_saved_config_lists_targets_in_one_order(base, tmp_path):
    """PEFT keeps targets in a set, whose order changes from process to process."""
    folder = save(adapt(base, section()), tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    for key in ("target_modules", "target_parameters"):
        assert len(config[key]) > 1 and config[key] == sorted(config[key])


@pytest.mark.parametrize("named", [True, False])
def test_only_a_named_target_warns(named, caplog):
    targets = {"targets": ["attention", "shared_experts"]} if named else {}
    model = tiny.model("qwen3_moe")
    lora_config(model, LoraSection(rank=3, **targets), "full")
    assert ("has no shared_experts" in caplog.text) is named
