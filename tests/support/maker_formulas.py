"""Adapters as Tinker, Megatron-Bridge and Automodel write them, and what their factors mean.

Each maker's formula is written out here, expert by expert.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from moe_finetune.models import FAMILIES
from tests.support import tiny, tiny_families

RANK, ALPHA = 3, 7.5
WEIGHTS = "adapter_model.safetensors"
TINY = ("deepseek_v2", "olmoe")  # whose classes do not run with the sizes of tiny_families


class Experts:
    """A tiny family's experts, and random factors of each projection: A (n, r, I), B (n, O, r)."""

    def __init__(self, name: str, shared: bool, base: Path, common_a: bool = False):
        self.base = base
        self.model = (tiny if name in TINY else tiny_families).model(name).eval()
        if not base.exists():
            self.model.save_pretrained(base)
        self.places = FAMILIES[name].places(self.model.config)
        self.paths = {
            layer: f"{self.places.backbone}.layers.{layer}.{self.places.experts_path}"
            for layer in self.places.moe_layers
        }
        module = self.module(self.places.moe_layers[0])
        self.turned = module.is_transposed
        first = getattr(module, self.places.expert_parameters[0])
        total, *sizes = first.shape
        rows, hidden = reversed(sizes) if self.turned else sizes
        self.total, self.hidden = total, hidden
        self.width = rows // 2 if self.places.gated else rows
        generator = torch.Generator().manual_seed(7)

        def random(*shape):
            return torch.randn(shape, generator=generator) * 0.2

        self.factors = {}
        for layer in self.paths:
            few = 1 if shared else total
            roles = ("gate", "up") if self.places.gated else ("up",)
            a = random(few, RANK, hidden)
            for role in roles:
                own = a if common_a else random(few, RANK, hidden)
                self.factors[layer, role] = own, random(total, self.width, RANK)
            down_b = random(few, hidden, RANK)
            self.factors[layer, "down"] = random(total, RANK, self.width), down_b
        self.attention = {}
        for path, module in self.model.named_modules():
            inside = path.startswith(self.places.backbone)
            if inside and path.endswith((".q_proj", ".o_proj")) and hasattr(module, "weight"):
                out, inputs = module.weight.shape
                self.attention[path] = random(RANK, inputs), random(out, RANK)

    def module(self, layer):
        return self.model.get_submodule(self.paths[layer])

    def rows(self, role):
        module = self.module(self.places.moe_layers[0])
        if role == "down" or not self.places.gated:
            return slice(None)
        if module.is_concatenated:
            return slice(0, self.width) if role == "gate" else slice(self.width, None)
        return slice(0 if role == "gate" else 1, None, 2)

    @torch.no_grad()
    def change_model(self, scale=ALPHA / RANK, attention=True):
        """The maker's formula: W_e + alpha / r * B_e A_e for each expert and projection."""
        for (layer, role), (a, b) in self.factors.items():
            first, down = self.places.expert_parameters
            stack = getattr(self.module(layer), down if role == "down" else first)
            for expert in range(self.total):
                a_rI, b_Or = a[expert % len(a)], b[expert % len(b)]
                matrix = stack[expert].T if self.turned else stack[expert]
                matrix[self.rows(role)] += scale * b_Or @ a_rI
        for path, (a, b) in self.attention.items() if attention else ():
            self.model.get_submodule(path).weight += scale * b @ a
        return self.model

    def attention_tensors(self):
        return {
            f"{path}.lora_{side}.weight": factor
            for path, pair in self.attention.items()
            for side, factor in zip("AB", pair, strict=True)
        }


W = {"gate": "w1", "up": "w3", "down": "w2"}
PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def tinker(experts):
    """3-D factors by w1, w2, w3; of experts without a gate w1 is up, w3 an empty placeholder."""
    names = W if experts.places.gated else {"up": "w1", "down": "w2"}
    tensors = experts.attention_tensors()
    for (layer, role), pair in experts.factors.items():
        for side, factor in zip("AB", pair, strict=True):
            tensors[f"{experts.paths[layer]}.{names[role]}.lora_{side}.weight"] = factor
            if not experts.places.gated:
                tensors[f"{experts.paths[layer]}.w3.lora_{side}.weight"] = torch.empty(0, 0, 0)
    return tensors, {"r": RANK, "lora_alpha": ALPHA}


def megatron(experts):
    """The shared factor once, the other under each expert's name in the base's files."""
    tensors = experts.attention_tensors()
    for (layer, role), pair in experts.factors.items():
        for side, factor in zip("AB", pair, strict=True):
            path = f"{experts.paths[layer]}.%s{PROJECTIONS[role]}.lora_{side}.weight"
            if len(factor) == 1:
                tensors[path % ""] = factor
                continue
            tensors |= {path % f"{e}.": matrix for e, matrix in enumerate(factor)}
    return tensors, peft_config(experts)


def automodel(experts):
    """Grouped: A (E, in, r), B (E, r, out), with all rows of gate before those of up."""
    tensors = experts.attention_tensors()
    for (layer, role), (a, b) in experts.factors.items():
        path = experts.paths[layer]
        if role == "down":
            tensors |= {f"{path}.lora_down_A": a.mT, f"{path}.lora_down_B": b.mT}
        elif role == "up":
            rows = [experts.factors[layer, "gate"][1], b] if experts.places.gated else [b]
            tensors |= {
                f"{path}.lora_gate_and_up_A": a.mT,
                f"{path}.lora_gate_and_up_B": torch.cat(rows, 1).mT,
            }
    return tensors, peft_config(experts) | {"gate_up_rows": "halves"}


def peft_config(experts):
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    }


def save(folder, tensors, config):
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    named = {f"base_model.model.{key}": value.contiguous() for key, value in tensors.items()}
    save_file({key: value.clone() for key, value in named.items()}, folder / WEIGHTS)
    return folder


MAKERS = {
    "tinker": (tinker, {"shared": True}),
    "tinker, nothing shared": (tinker, {"shared": False}),
    "megatron": (megatron, {"shared": True, "common_a": True}),
    "automodel": (automodel, {"shared": False, "common_a": True}),
}


def ids():
    return torch.randint(4, 200, (2, 11), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model):
    return model(input_ids=ids()).logits
