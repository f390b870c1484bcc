"""The native DeepSeek-MoE against a slow reference, its names on disk, and what trainers ask."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from moe_finetune.errors import UnsupportedModelError
from moe_finetune.models import FAMILIES, deepseek_moe, family_of
from moe_finetune.models.deepseek_moe import DeepseekForCausalLM
from tests.models import deepseek_reference
from tests.published import fixture
from tests.support import tiny

PUBLISHED = fixture.read("deepseek_moe_16b").config
VARIANTS = [
    {},
    {"norm_topk_prob": True, "n_shared_experts": None},
    {"moe_layer_freq": 2, "num_hidden_layers": 4, "first_k_dense_replace": 1},
]


def _saved(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}


def _assert_near(got: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
    """Equal to 1e-5 of the tensor's largest entry."""
    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max().clamp_min(1e-3), name


def test_a_dense_llama_says_nothing_of_its_experts():
    # Transformers notes on a class whether its experts can be set, and classes inherit the note.
    assert not LlamaForCausalLM._can_set_experts_implementation()
    assert DeepseekForCausalLM._can_set_experts_implementation()


@pytest.mark.parametrize("changes", VARIANTS)
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_logits_and_gradients_equal_the_slow_reference(tmp_path, changes, experts):
    model = tiny.model("deepseek_moe", **changes)
    model.save_pretrained(tmp_path)
    weights = {name: t.requires_grad_() for name, t in _saved(tmp_path).items()}
    tokens = torch.randint(4, 260, (11,), generator=torch.Generator().manual_seed(3))

    expected = deepseek_reference.logits(tokens.tolist(), weights, model.config)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4))
    (expected * upstream).sum().backward()

    model.set_experts_implementation(experts)
    got = model(input_ids=tokens[None]).logits[0]
    (got * upstream).sum().backward()

    torch.testing.assert_close(got, expected.detach(), atol=2e-5, rtol=1e-5)
    grads = {name: p.grad for name, p in model.named_parameters()}
    checked = set()
    for layer in FAMILIES["deepseek_moe"].places(model.config).moe_layers:
        mlp = f"model.layers.{layer}.mlp"
        width = model.config.moe_intermediate_size
        fused, down = grads[f"{mlp}.experts.gate_up_proj"], grads[f"{mlp}.experts.down_proj"]
        for e in range(model.config.n_routed_experts):
            parts = {"gate": fused[e, :width], "up": fused[e, width:], "down": down[e]}
            for kind, grad in parts.items():
                name = f"{mlp}.experts.{e}.{kind}_proj.weight"
                # an expert that no token chose has no gradient in the reference
                wanted = weights[name].grad
                wanted = torch.zeros_like(grad) if wanted is None else wanted
                torch.testing.assert_close(grad, wanted, atol=1e-4, rtol=1e-4, msg=name)
                checked.add(name)
    for name, tensor in weights.items():
        if name not in checked:
            _assert_near(grads[name], tensor.grad, name)


def test_layers_are_dense_or_sparse_as_the_config_says():
    model = tiny.model("deepseek_moe", moe_layer_freq=2, num_hidden_layers=5)
    kinds = [type(layer.mlp).__name__ for layer in model.model.layers]
    dense = "DeepseekV2MLP"
    assert kinds == [dense, dense, "DeepseekMoE", dense, "DeepseekMoE"]
    assert FAMILIES["deepseek_moe"].places(model.config).moe_layers == (2, 4)


@pytest.mark.parametrize("shard_size", ["50GB", "200KB"])
def test_round_trip_keeps_the_published_names_and_bytes(tmp_path, shard_size):
    model = tiny.model("deepseek_moe")
    model.save_pretrained(tmp_path / "a", max_shard_size=shard_size)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    again.save_pretrained(tmp_path / "b", max_shard_size=shard_size)

    first, second = _saved(tmp_path / "a"), _saved(tmp_path / "b")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 1 or shard_size == "50GB"
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    for name, parameter in model.state_dict().items():
        assert torch.equal(parameter, again.state_dict()[name]), name
    assert set(first) == _published_names(model.config)
    # gate rows first, one matrix per expert
    fused = model.model.layers[1].mlp.experts.gate_up_proj
    width = model.config.moe_intermediate_size
    assert torch.equal(first["model.layers.1.mlp.experts.7.gate_proj.weight"], fused[7, :width])
    assert torch.equal(first["model.layers.1.mlp.experts.7.up_proj.weight"], fused[7, width:])


def _published_names(config) -> set[str]:
    """Tensor names of the published checkpoint."""
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    sparse = FAMILIES["deepseek_moe"].places(config).moe_layers
    kinds = ("gate_proj", "up_proj", "down_proj")
    for layer in range(config.num_hidden_layers):
        base = f"model.layers.{layer}"
        names |= {f"{base}.{n}_layernorm.weight" for n in ("input", "post_attention")}
        names |= {f"{base}.self_attn.{p}_proj.weight" for p in "qkvo"}
        if layer not in sparse:
            names |= {f"{base}.mlp.{kind}.weight" for kind in kinds}
            continue
        names |= {f"{base}.mlp.shared_experts.{kind}.weight" for kind in kinds}
        names.add(f"{base}.mlp.gate.weight")
        for expert in range(config.n_routed_experts):
            names |= {f"{base}.mlp.experts.{expert}.{kind}.weight" for kind in kinds}
    return names


def test_published_config_loads_and_its_code_is_neither_run_nor_written_back(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    for module in ("configuration_deepseek", "modeling_deepseek"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('remote code ran')\n")
    deepseek_moe.register()
    config = AutoConfig.from_pretrained(tmp_path)
    for key in PUBLISHED.keys() - {
        "auto_map",
        "rope_theta",
        "rope_scaling",
        "torch_dtype",
        "transformers_version",
    }:
        assert getattr(config, key) == PUBLISHED[key], key
    assert config.rope_parameters == {"rope_theta": 10000, "rope_type": "default"}
    assert config.dtype == torch.bfloat16
    config.save_pretrained(tmp_path / "out")
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert family_of(config).name == "deepseek_moe"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
        ({"num_experts_per_tok": 13}, "num_experts_per_tok 13"),
    ],
)
def test_options_that_no_release_uses_are_refused(changes, word):
    with pytest.raises(UnsupportedModelError, match=word):
        tiny.model("deepseek_moe", **changes)


@pytest.mark.parametrize("attention", ["eager", "flex_attention"])
@torch.compiler.set_stance("force_eager")  # torch's own compilation of flex attention is long
def test_attention_implementations_agree_with_sdpa(attention):
    batch = tiny.batch()
    keep = batch["attention_mask"].bool()
    model = tiny.model("deepseek_moe")
    with torch.no_grad():
        expected = model(**batch).logits[keep]
        model.set_attn_implementation(attention)
        torch.testing.assert_close(model(**batch).logits[keep], expected, atol=2e-5, rtol=1e-5)


def test_cached_generation_equals_recomputing_every_step():
    model = tiny.model("deepseek_moe")
    prompt = torch.randint(4, 260, (1, 9), generator=torch.Generator().manual_seed(6))
    cached = model.generate(prompt, max_new_tokens=17, do_sample=False, eos_token_id=None)
    ids = prompt
    for _ in range(17):
        with torch.no_grad():
            step = model(ids, logits_to_keep=1, use_cache=False).logits
        assert step.shape == (1, 1, tiny.VOCABULARY)
        ids = torch.cat((ids, step[0].argmax(-1, keepdim=True)), 1)
    assert torch.equal(cached, ids)
