"""Tiny checkpoints with a head that predicts further tokens, its tensors called as published.

The names are those that vLLM's loaders of these heads read, and transformers' classes leave out.
"""

import torch
from safetensors.torch import load_file, save_file

from tests.support import names_on_disk, tiny
from tests.support import tiny_families as families

WEIGHTS = "model.safetensors"
# A layer after the decoder's last: DeepSeek-V3, GLM-4.5, Hunyuan 3 and their kin.
LATER_LAYER = (
    "{stack}{layers}.eh_proj.weight",
    "{stack}{layers}.enorm.weight",
    "{stack}{layers}.hnorm.weight",
    "{stack}{layers}.shared_head.norm.weight",
    "{stack}{layers}.shared_head.head.weight",
    "{stack}{layers}.embed_tokens.weight",
    "{stack}{layers}.mlp.gate.weight",
    "{stack}{layers}.mlp.experts.0.gate_proj.weight",
    "{stack}{layers}.mlp.experts.1.up_proj.weight",
)
QWEN = (
    "mtp.fc.weight",
    "mtp.norm.weight",
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
    "mtp.layers.0.self_attn.q_proj.weight",
    "mtp.layers.0.mlp.gate.weight",
    "mtp.layers.0.mlp.experts.3.down_proj.weight",
    "mtp.layers.0.mlp.experts.gate_up_proj",
)
HEADS: dict[str, tuple[str, ...]] = {
    "deepseek_v32": LATER_LAYER,
    "deepseek_v4": (
        "mtp.0.e_proj.weight",
        "mtp.0.h_proj.weight",
        "mtp.0.attn.wq_a.weight",
        "mtp.0.ffn.gate.weight",
        "mtp.0.ffn.experts.2.w1.weight",
    ),
    "ernie4_5_moe": (
        "model.mtp_block.0.mlp.down_proj.weight",
        "model.mtp_emb_norm.0.weight",
        "model.mtp_hidden_norm.0.weight",
        "model.mtp_linear_proj.0.weight",
    ),
    "exaone_moe": ("mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.mlp.gate_proj.weight"),
    "glm4_moe": LATER_LAYER,
    "glm4_moe_lite": LATER_LAYER,
    "glm4v_moe": LATER_LAYER,
    "glm5_next": LATER_LAYER,
    "glm_moe_dsa": LATER_LAYER,
    "hy_v3": (*LATER_LAYER, "{stack}{layers}.mlp.router.gate.weight"),
    "hy_v4": ("model.mtp_layers.0.eh_proj.weight",),
    "inkling_mm_model": ("model.mtp.layers.0.input_proj.weight",),
    "mimo_v2_flash": ("model.mtp.layers.0.eh_proj.weight", "model.mtp.layers.0.enorm.weight"),
    "minimax_m2": (
        *(name.replace(".mlp.", ".block_sparse_moe.") for name in LATER_LAYER),
        "mtp.layers.0.input_layernorm.weight",  # where config.json counts modules of the head
    ),
    "minimax_m3_vl": ("language_model.model.mtp.layers.0.eh_proj.weight",),
    "deepseek_v3": LATER_LAYER,
    "nemotron_h": (
        "mtp.layers.0.eh_proj.weight",
        "mtp.layers.0.mixer.q_proj.weight",
        "mtp.layers.1.mixer.experts.3.up_proj.weight",
        "mtp.layers.1.final_layernorm.weight",
    ),
    "qwen3_5_moe": QWEN,
    "qwen3_5_moe_text": QWEN,
    "qwen3_next": QWEN,
    "qwen4_exp_text": QWEN,
}


def names_of(family: str) -> list[str]:
    """Names of the head's tensors in the files of the family's tiny model."""
    stack = names_on_disk.stack(family)
    layers = tiny.config(family) if family in tiny.FAMILY_NAMES else families.config(family)
    count = layers.get_text_config().num_hidden_layers
    return [name.format(stack=stack, layers=count) for name in HEADS[family]]


def with_head(family, folder, names=None, **changes):
    """Write the family's tiny model and random tensors of these names; the model and the tensors.

    ``changes`` are of the tiny model; the names are by default the published head's.
    """
    count = {"num_nextn_predict_layers": 1}
    counts = {"minimax_m2": {"num_mtp_modules": 3}, "deepseek_v3": count, "glm4_moe_lite": count}
    source = tiny if family in tiny.FAMILY_NAMES else families
    model = source.model(family, **counts.get(family, {}) | changes)
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return model, add_head(folder, names_of(family) if names is None else names)


def add_head(folder, names):
    """Put random tensors of these names into the folder's one file, and return them."""
    generator = torch.Generator().manual_seed(8)
    head = {
        name: torch.randn(3 + place, 5, generator=generator).to(torch.bfloat16)
        for place, name in enumerate(names)
    }
    save_file(load_file(folder / WEIGHTS) | head, folder / WEIGHTS, metadata={"format": "pt"})
    return head


def carries(folder, head):
    """Whether the folder's one file has these tensors."""
    stored = load_file(folder / WEIGHTS)
    return all(torch.equal(stored[name], tensor) for name, tensor in head.items())
