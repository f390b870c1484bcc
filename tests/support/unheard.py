"""A model type that transformers' registry knows and the toolkit does not: GLM-4.5's, renamed."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM

from moe_finetune.models.family import Family, expert_groups
from tests.support import tiny, tiny_families


class UnheardConfig(Glm4MoeConfig):
    model_type = "unheard_moe"


class UnheardForCausalLM(Glm4MoeForCausalLM):
    config_class = UnheardConfig


def register() -> None:
    """Tell transformers of the type; repeatable."""
    AutoConfig.register("unheard_moe", UnheardConfig, exist_ok=True)
    AutoModelForCausalLM.register(UnheardConfig, UnheardForCausalLM, exist_ok=True)


def config() -> UnheardConfig:
    """A tiny config."""
    register()
    plain = tiny_families.config("glm4_moe").to_dict()
    plain |= {"model_type": "unheard_moe", "architectures": ["UnheardForCausalLM"]}
    return UnheardConfig.from_dict(plain)


def save(folder) -> None:
    """A tiny checkpoint with a tokenizer."""
    torch.manual_seed(0)
    UnheardForCausalLM(config()).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)


def family() -> Family:
    """What a plugin would hand over."""
    return Family(
        "unheard",
        "unheard_moe",
        "Unheard",
        score="sigmoid",
        scaling=lambda config: config.routed_scaling_factor,
        groups=expert_groups,
        bias_export="tensor",
    )


def families() -> list[Family]:
    """As a callable that registers its class, too."""
    register()
    return [family()]


NO_FAMILY = "a value that a plugin must not hand over"


def broken() -> None:
    """A plugin whose code fails."""
    raise RuntimeError("no such thing")
