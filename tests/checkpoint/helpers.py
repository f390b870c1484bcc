"""Random adapters of every kind on the tiny checkpoints, and logits to compare."""

import shutil
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from moe_finetune.checkpoint.adapters.files import write_metadata
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.models import FAMILIES
from tests.support import tiny
from tests.support.places import places

EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def load(folder: Path, dtype: torch.dtype = torch.float32):
    """The checkpoint in transformers, eval mode."""
    from transformers import AutoModelForCausalLM

    register(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def register(folder: Path) -> None:
    """Make transformers know the native classes."""
    from moe_finetune.models import deepseek_moe

    if "deepseek_moe" in folder.as_posix():
        deepseek_moe.register()


def shared_parameters(family: str) -> list[str]:
    """``target_parameters`` of the shared experts.

    PEFT 0.21 turns ``target_modules`` that end in ``up_proj`` into the fused experts, so the shared
    experts are named as parameters.
    """
    return [f"{target}.weight" for target in places(family).shared]


def adapter(base: Path, folder: Path, seed: int = 3, scale: float = 0.05, **options) -> Path:
    """Save a random adapter on ``base``: attention, shared experts, experts, router by default."""
    from peft import LoraConfig, get_peft_model

    family = next(f for f in FAMILIES if f in base.as_posix())
    settings = {
        "r": 4,
        "lora_alpha": 12,
        "target_modules": list(places(family).attention),
        "target_parameters": [*EXPERTS, "gate.weight", *shared_parameters(family)],
    } | options
    model = load(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = get_peft_model(model, LoraConfig(**settings))
    randomize(peft, seed, scale)
    peft.save_pretrained(folder, save_embedding_layers=False)
    return folder


def randomize(peft, seed: int, scale: float) -> None:
    """Random factors and random changes of the saved modules."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*peft.named_parameters(), *peft.named_buffers()]:
            noise = torch.randn(tensor.shape, generator=generator) * scale
            if "lora_" in name:
                tensor.copy_(noise)
            elif "modules_to_save" in name:
                tensor.add_(noise)


@torch.no_grad()
def logits(model, seed: int = 1) -> torch.Tensor:
    """Logits on the fixed padded batch."""
    inputs = tiny.batch(seed=seed)
    return model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits


def with_adapter(base: Path, folder: Path):
    """Base and adapter in stock PEFT."""
    from peft import PeftModel

    return PeftModel.from_pretrained(load(base), folder).eval()


def select(adapter, base, chosen, output):
    """The parts of a full adapter that belong to ``chosen``, packed as moe_finetune.json says."""
    opened = open_checkpoint(base)
    tensors = load_file(adapter / "adapter_model.safetensors")
    small = {}
    for key, tensor in tensors.items():
        if ".experts." not in key:
            small[key] = tensor
            continue
        layer = int(key.split(".layers.")[1].split(".")[0])
        if layer not in chosen:
            continue
        total, ids = opened.experts[layer], chosen[layer]
        if "lora_A" in key:
            packed = torch.cat([tensor.chunk(total)[expert] for expert in ids])
        else:
            by_rank = [tensor[:, r * total : (r + 1) * total][:, ids] for r in range(4)]
            packed = torch.cat(by_rank, 1)
        small[key] = packed.contiguous()
    output.mkdir()
    save_file(small, output / "adapter_model.safetensors")
    shutil.copy(adapter / "adapter_config.json", output)
    write_metadata(output, experts=chosen, experts_dropout=0.1)
    return output
