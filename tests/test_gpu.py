"""What a GPU decides: its kernels against slow ones. ``pytest -m gpu`` runs the GPU's half."""

import json
import subprocess
import sys

import pytest
import torch

from moe_finetune import Specialization
from moe_finetune.lora.targets import add_lora
from moe_finetune.recipe.sections import LoraSection

METHOD = {
    "terms": {
        "orthogonality": {"weight": 0.3},
        "variance": {"weight": 0.3},
        "coupling": {"weight": 0.3},
        "erc": {"weight": 0.3, "noise": False},
    },
    "strength": {"first": False},
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def config():
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, moe_intermediate_size=64,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        num_experts=16, num_experts_per_tok=4, norm_topk_prob=True,
        architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip


def adapted(dtype, device):
    """A small model with LoRA everywhere; the same weights in any dtype."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)
    model = add_lora(model.to(dtype), LoraSection(rank=8, alpha=16.0), "full").train()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.05)
    return model.to(device)


def gradients(model, kernel):
    """All gradients of a step under four losses, as one vector in float32."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, model.config.vocab_size, (2, 64), generator=generator).to(model.device)
    model.zero_grad()
    with Specialization(model, METHOD, kernel=kernel):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    found = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(found).cpu()


def apart(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.3)])
def test_the_grouped_kernel_is_one_product_an_expert(device, dtype, bound):
    model = adapted(dtype, device)
    assert apart(*(gradients(model, kernel) for kernel in ("grouped", "loop"))) < bound


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_in_bfloat16_are_those_of_float32(device):
    models = [adapted(dtype, device) for dtype in (torch.bfloat16, torch.float32)]
    distance = apart(*(gradients(model, "grouped") for model in models))
    assert 1e-4 < distance < 0.35, "two dtypes were compared"


VLLM = """
import json, sys
from vllm import LLM, SamplingParams
job = json.loads(sys.argv[1])
engine = LLM(model=job["folder"], skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
             tensor_parallel_size=job["ranks"], enable_expert_parallel=True,
             gpu_memory_utilization=0.3, max_model_len=64)
options = SamplingParams(temperature=0.0, max_tokens=12, detokenize=False, ignore_eos=True)
(found,) = engine.generate([{"prompt_token_ids": job["ids"]}], options)
print(json.dumps(list(found.outputs[0].token_ids)))
"""


@pytest.mark.gpu
@pytest.mark.vllm
def test_vllm_with_expert_parallelism_decodes_as_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    pytest.importorskip("vllm")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(), dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    ids = torch.arange(7, 19).unsqueeze(0)
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    ranks = 2 if torch.cuda.device_count() > 1 else 1
    job = json.dumps({"folder": str(tmp_path), "ids": ids[0].tolist(), "ranks": ranks})
    done = subprocess.run([sys.executable, "-c", VLLM, job], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == out[0, ids.shape[1] :].tolist()
