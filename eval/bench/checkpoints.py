"""Random checkpoints with Qwen3-30B-A3B's names and widths, and adapters of them."""

import json
from pathlib import Path

import torch
from geometries import GEOMETRIES

from moe_finetune.io.safetensors_header import build_header
from moe_finetune.models.class_structure import shapes_on_disk

KINDS = {"BF16": torch.bfloat16, "F32": torch.float32}


def write_checkpoint(folder: Path, layers: int, vocabulary: int, shard_bytes: float = 2e9) -> None:
    """A bfloat16 checkpoint in shards of about ``shard_bytes``, without tokenizer."""
    config = GEOMETRIES["qwen3_30b_a3b"][0]()
    config.num_hidden_layers, config.vocab_size, config.dtype = layers, vocabulary, "bfloat16"
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in shapes_on_disk(config).items():
        size = 2 * torch.Size(shape).numel()
        if filled and filled + size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += size
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_random(file, shard, "BF16", 0.02, seed=number)
        weight_map |= dict.fromkeys(shard, file.name)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)


def write_adapter(folder: Path, layers: int, rank: int) -> None:
    """An adapter in PEFT's format on attention, routed experts and routers."""
    from peft import LoraConfig

    config = GEOMETRIES["qwen3_30b_a3b"][0]()
    hidden, width, experts = config.hidden_size, config.moe_intermediate_size, config.num_experts
    heads, kv = (config.head_dim * n for n in (config.num_attention_heads,
                                               config.num_key_value_heads))  # fmt: skip
    sizes = {  # module: out, in, stacked factors
        "self_attn.q_proj": (heads, hidden, 1),
        "self_attn.k_proj": (kv, hidden, 1),
        "self_attn.v_proj": (kv, hidden, 1),
        "self_attn.o_proj": (hidden, heads, 1),
        "mlp.gate": (experts, hidden, 1),
        "mlp.experts.base_layer": (2 * width, hidden, experts),
        "mlp.experts": (hidden, width, experts),
    }
    shapes = {}
    for layer in range(layers):
        for module, (outputs, inputs, stack) in sizes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            shapes[f"{name}.lora_A.weight"] = (rank * stack, inputs)
            shapes[f"{name}.lora_B.weight"] = (outputs, rank * stack)
    folder.mkdir()
    write_random(folder / "adapter_model.safetensors", shapes, "F32", 0.01, seed=99)
    LoraConfig(
        r=rank,
        lora_alpha=4 * rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"],
        task_type="CAUSAL_LM",
    ).save_pretrained(str(folder))


def write_random(file: Path, shapes: dict, dtype: str, deviation: float, seed: int) -> None:
    """Write random values, tensor by tensor, each a different part of one random pool."""
    generator = torch.Generator().manual_seed(seed)
    pool = (torch.randn(1 << 23, generator=generator) * deviation).to(KINDS[dtype])
    header = build_header(file, [(name, dtype, shape) for name, shape in shapes.items()])
    with file.open("wb") as stream:
        stream.write(header.raw)
        for number, info in enumerate(header.tensors.values()):
            left = info.size // pool.element_size()
            start = (number * 7919) % (1 << 22)
            while left:
                part = pool[start : start + left]
                stream.write(part.view(torch.uint8).numpy().data)
                left, start = left - len(part), 0
