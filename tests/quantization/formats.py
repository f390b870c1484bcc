"""Tiny checkpoints stored quantized, in the layouts of published ones."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

BLOCK = (24, 40)
"""Rows and columns of a scale's block; neither divides the matrices."""


def packs(name: str) -> bool:
    return name.endswith("_proj.weight") and "layers" in name


def as_fp8(tensors):
    """DeepSeek-V3's layout, and the floats that it stands for."""
    stored, floats = {}, {}
    for name, tensor in tensors.items():
        if not packs(name):
            stored[name] = floats[name] = tensor
            continue
        rows, columns = tensor.shape
        tiles = [-(-rows // BLOCK[0]), -(-columns // BLOCK[1])]
        scale, made = torch.empty(tiles), torch.empty(tensor.shape)
        weight = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
        for r in range(tiles[0]):
            for c in range(tiles[1]):
                part = (
                    slice(r * BLOCK[0], (r + 1) * BLOCK[0]),
                    slice(c * BLOCK[1], (c + 1) * BLOCK[1]),
                )
                scale[r, c] = tensor[part].abs().max() / 448
                weight[part] = (tensor[part] / scale[r, c]).to(torch.float8_e4m3fn)
                made[part] = weight[part].float() * scale[r, c]
        stored[name], floats[name] = weight, made
        stored[f"{name}_scale_inv"] = scale
    config = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
    return stored, floats, config


def as_int4(tensors):
    """compressed-tensors' own packing, and the floats that it stands for."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    stored, floats, group = {}, {}, 16
    for name, tensor in tensors.items():
        if not packs(name):
            stored[name] = floats[name] = tensor
            continue
        rows, columns = tensor.shape
        blocks = tensor.reshape(rows, columns // group, group)
        scale = blocks.abs().amax(2) / 7
        digits = (blocks / scale.unsqueeze(2)).round().clamp(-8, 7).reshape(rows, columns)
        stem = name.removesuffix(".weight")
        stored[f"{stem}.weight_packed"] = pack_to_int32(digits.to(torch.int8), 4)
        stored[f"{stem}.weight_scale"] = scale
        stored[f"{stem}.weight_shape"] = torch.tensor([rows, columns])
        floats[name] = digits * scale.repeat_interleave(group, 1)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": group}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights}},
    }
    return stored, floats, config


def rewrite(folder: Path, make) -> dict[str, torch.Tensor]:
    """Store the checkpoint quantized; the floats that it then stands for, by name."""
    file, config = folder / "model.safetensors", folder / "config.json"
    stored, floats, said = make(load_file(file))
    save_file({n: t.contiguous() for n, t in stored.items()}, file, metadata={"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": said}))
    return floats


def as_mxfp4(tensors):
    """gpt-oss's layout with random blocks, and what transformers makes of them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(4)
    stored, floats = {}, {}
    for name, tensor in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = floats[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        assert inputs % 32 == 0
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator)
        scales = torch.randint(118, 124, (experts, outputs, inputs // 32), generator=generator)
        stored[f"{name}_blocks"] = blocks.to(torch.uint8)
        stored[f"{name}_scales"] = scales.to(torch.uint8)
        made = convert_moe_packed_tensors(
            stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float32
        )
        assert made.shape == tensor.shape
        floats[name] = made.contiguous()
    return stored, floats, {"quant_method": "mxfp4"}
