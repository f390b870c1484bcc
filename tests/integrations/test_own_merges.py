"""Adapters beside their makers' own packages: what those merge and compute, and what we merge.

``make test-integrations`` installs them; without that the tests are skipped.
"""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from moe_finetune.checkpoint.merge import merge_adapter
from tests.integrations.environments import environment_of, python
from tests.support import tiny
from tests.support.maker_formulas import MAKERS, RANK, Experts, save
from tests.support.tinker_parts import SPLIT, split_factors
from tests.support.tiny_adapter import random_factors

pytestmark = pytest.mark.slow

MERGE_OF_TINKER = """
import sys, types

for name in ("pyrage", "tinker"):  # to fetch adapters from its service
    sys.modules[name] = types.ModuleType(name)
from tinker_cookbook.weights import build_hf_model

base, adapter, merged = sys.argv[1:]
build_hf_model(base_model=base, adapter_path=adapter, output_path=merged)
"""
MERGE_OF_AXOLOTL = """
import sys

from axolotl.cli.utils.lora_merge import merge_lora_sharded_efficient

merge_lora_sharded_efficient(*sys.argv[1:])
"""


def stored(folder):
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def same(found, wanted, base):
    """All tensors of two merges are equal up to float32 rounding, and not the base's."""
    assert found.keys() == wanted.keys() == base.keys()
    assert sum(not torch.equal(found[key], base[key]) for key in base) >= 10
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-6, atol=1e-6, msg=key)


@pytest.mark.parametrize("maker", ["tinker", "tinker, nothing shared"])
@pytest.mark.parametrize(
    "name", ["qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h", "qwen3_5_moe", "qwen3_vl_moe"]
)
def test_tinker_s_own_merge_is_ours(name, maker, tmp_path):
    packages = environment_of("tinker")
    write, options = MAKERS[maker]
    experts = Experts(name, base=tmp_path / "base", **options)
    tensors, config = write(experts)
    for root in ("model.language_model.", "backbone."):  # Tinker has one name for all
        tensors = {key.replace(root, "model."): value for key, value in tensors.items()}
    if name in SPLIT:
        tensors |= split_factors(name, experts.model, experts.places)
    head = experts.model.lm_head.weight
    tensors |= {
        "model.unembed_tokens.lora_A.weight": torch.randn(RANK, head.shape[1]),
        "model.unembed_tokens.lora_B.weight": torch.randn(head.shape[0], RANK),
    }
    adapter = save(tmp_path / "adapter", tensors, config)
    paths = [str(tmp_path / part) for part in ("base", "adapter", "theirs")]
    done = python(packages, ["-c", MERGE_OF_TINKER, *paths], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    merge_adapter(experts.base, adapter, tmp_path / "ours")
    same(stored(tmp_path / "ours"), stored(tmp_path / "theirs"), stored(experts.base))


@pytest.mark.parametrize("square", [False, True], ids=["oblong", "square"])
@pytest.mark.parametrize(
    "option", [None, "legacy_paramwrapper_layout", "v4_compatible"], ids=lambda o: o or "default"
)
def test_automodel_s_own_merge_and_forward_are_ours(option, square, tmp_path):
    packages = environment_of("automodel")
    sizes = {"moe_intermediate_size": 192} if square else {}
    base = tiny.save("qwen3_moe", tmp_path / "base", **sizes)
    options = json.dumps({option: True} if option else {})
    arguments = ["-m", "tests.integrations.automodel_adapter", str(base), str(tmp_path), options]
    done = python(packages, arguments, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    merge_adapter(base, tmp_path / "saved" / "model", tmp_path / "ours")
    ours, before = stored(tmp_path / "ours"), stored(base)
    # Its export leaves out "model." before the experts' names.
    theirs = {
        key if key in before else f"model.{key}": value
        for key, value in stored(tmp_path / "merged").items()
    }
    same(ours, theirs, before)
    computed = load_file(tmp_path / "logits.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    with torch.no_grad():
        found = model(computed["ids"]).logits
    assert (found - computed["logits"]).norm() < 1e-5 * found.norm()


def test_axolotl_s_own_merge_of_peft_s_stacks_is_ours(tmp_path):
    """Of gpt-oss; experts with a matrix each in the base's files are left out there, as it says."""
    packages = environment_of("axolotl")
    base = tmp_path / "base"
    model = Experts("gpt_oss", shared=False, base=base).model
    options = {
        "target_modules": ["q_proj", "o_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }
    built = get_peft_model(model, LoraConfig(r=3, lora_alpha=7.5, **options))
    torch.manual_seed(3)
    random_factors(built, 0.2)
    built.save_pretrained(tmp_path / "adapter")
    paths = [str(tmp_path / part) for part in ("base", "adapter", "theirs")]
    done = python(packages, ["-c", MERGE_OF_AXOLOTL, *paths], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    merge_adapter(base, tmp_path / "adapter", tmp_path / "ours")
    same(stored(tmp_path / "ours"), stored(tmp_path / "theirs"), stored(base))
