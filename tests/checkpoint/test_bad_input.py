"""Every defect of a checkpoint: one message with the place, and nothing written."""

import json
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.checkpoint.open import check_folder
from moe_finetune.checkpoint.weight_files import check_values
from moe_finetune.errors import (
    CheckpointError,
    DiskSpaceError,
    NumericsError,
    UnsupportedModelError,
)
from moe_finetune.io import folder as output_module
from moe_finetune.io.safetensors_header import read_header
from tests.checkpoint.damage import WEIGHTS, configure, edit, refuse
from tests.support import tiny

INDEX = "model.safetensors.index.json"


def shard(base):
    return sorted(base.glob("*.safetensors"))[1]


# Checkpoints


def cut(bytes_kept):
    def change(base):
        shard(base).write_bytes(shard(base).read_bytes()[:bytes_kept])

    return change


def header(change):
    """Rewrite the entries of a shard's header, in a folder without an index."""

    def changed(base):
        raw = shard(base).read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        entries = json.loads(raw[8 : 8 + length])
        change(entries, next(name for name in entries if name != "__metadata__"))
        text = json.dumps(entries).encode()
        shard(base).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
        (base / INDEX).unlink()

    return changed


def shifted(entries, first):
    entries[first]["data_offsets"][1] += 4


def unknown_dtype(entries, first):
    entries[first]["dtype"] = "F7"


def hole(entries, first):
    del entries[max(entries.keys() - {"__metadata__"}, key=lambda n: entries[n]["data_offsets"])]


def unlisted_tensor(base):
    index = json.loads((base / INDEX).read_text())
    index["weight_map"]["model.layers.1.mlp.extra.weight"] = shard(base).name
    (base / INDEX).write_text(json.dumps(index))


def twice(base):
    (base / INDEX).unlink()
    shutil.copy(shard(base), base / "extra.safetensors")


def experts(count):
    return lambda base: configure(base / "config.json", num_local_experts=count)


def float8(base):
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    file = base / json.loads((base / INDEX).read_text())["weight_map"][name]
    edit(file, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))


SHARD = "model-00002-of-"
CHECKPOINTS = {
    "empty shard": (cut(0), SHARD, "truncated"),
    "cut in the header": (cut(40), SHARD, "truncated"),
    "cut in the data": (cut(-1000), SHARD, "truncated"),
    "offsets": (header(shifted), SHARD, "corrupt"),
    "dtype": (header(unknown_dtype), SHARD, "corrupt"),
    "hole": (header(hole), SHARD, "corrupt"),
    "html": (lambda base: shard(base).write_bytes(b"<html>" * 200), "truncated or corrupt"),
    "trailing byte": (
        lambda base: shard(base).write_bytes(shard(base).read_bytes() + b"x"), "not fully covered",
    ),
    "shard gone": (lambda base: shard(base).unlink(), SHARD, "is missing"),
    "shard and index gone": (
        lambda base: (shard(base).unlink(), (base / INDEX).unlink()), SHARD, "is missing",
    ),
    "unfinished download": (
        lambda base: (base / "model-00002.safetensors.incomplete").write_bytes(b""),
        "model-00002.safetensors.incomplete",
    ),
    "index of another": (unlisted_tensor, INDEX, "model.layers.1.mlp.extra.weight", SHARD),
    "index": (lambda base: (base / INDEX).write_text("{"), INDEX),
    "index of other folders": (
        lambda base: (base / INDEX).write_text('{"weight_map": {"a": "../../x.safetensors"}}'),
        INDEX,
    ),
    "layer gone": (
        lambda base: configure(base / "config.json", num_hidden_layers=4),
        "model.layers.3.", "is missing",
    ),
    "more experts": (experts(13), "experts.12.", "is missing"),
    "fewer experts": (experts(11), "experts.11.", "not belong"),
    "vocabulary": (
        lambda base: configure(base / "config.json", vocab_size=401), "vocab_size",
    ),
    "heads": (
        lambda base: configure(base / "config.json", num_key_value_heads=-4),
        "num_key_value_heads is -4; it must be a whole number from 1 to 65,536",
    ),
    "index that is a list": (
        lambda base: (base / INDEX).write_text("[]"), "contains list instead of an object",
    ),
    "config": (lambda base: (base / "config.json").write_text("{"), "config.json"),
    "twice": (twice, "extra.safetensors", SHARD),
    "float8": (float8, "layers.1.mlp.experts.3.up_proj", "F8_E4M3", "has no quantization"),
}  # fmt: skip


@pytest.mark.parametrize("defect", CHECKPOINTS)
def test_a_damaged_checkpoint(base, adapter, tmp_path, defect):
    damage, *parts = CHECKPOINTS[defect]
    damage(base)
    refuse(base, adapter, tmp_path, CheckpointError, base, *parts)


def test_folders_that_are_no_checkpoint(adapter, tmp_path):
    refuse(tmp_path / "no", adapter, tmp_path, CheckpointError, tmp_path / "no", "no such")
    refuse(adapter, adapter, tmp_path, CheckpointError, "this is an adapter")


def test_unknown_model_type(base, adapter, tmp_path):
    configure(base / "config.json", model_type="qwen3_mo")
    refuse(base, adapter, tmp_path, UnsupportedModelError, "qwen3_mo", "qwen3_moe")


@pytest.mark.parametrize(
    ("key", "section", "method"),
    [
        ("quantization_config", {"quant_method": "gptq", "bits": 4, "group_size": 128}, "GPTQ"),
        ("quantization_config", {"quant_method": "awq", "bits": 4, "group_size": 128}, "AWQ"),
        ("quantization_config", {"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        ("quantization_config", {"group_size": 64, "bits": 4, "mode": "affine"}, "MLX"),
        ("quantization", {"group_size": 64, "bits": 4}, "MLX"),
    ],
)
def test_a_format_that_cannot_be_read_is_named(base, adapter, tmp_path, key, section, method):
    configure(base / "config.json", **{key: section})
    parts = (f"quantized with {method}", "unquantized", "--base FOLDER")
    refuse(base, adapter, tmp_path, UnsupportedModelError, *parts)


def test_a_quantized_base_without_quantized_tensors_is_named(base, adapter, tmp_path):
    section = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    configure(base / "config.json", quantization_config=section)
    parts = ("quantization_config is fp8, but no tensor is stored that way",)
    refuse(base, adapter, tmp_path, CheckpointError, *parts)


@pytest.mark.parametrize(
    ("leaves", "method"),
    [
        (("qweight", "qzeros", "scales", "g_idx"), "GPTQ"),
        (("qweight", "qzeros", "scales"), "AWQ or GPTQ"),
        (("weight", "scales", "biases"), "MLX"),
        (("weight_packed", "weight_scale"), "compressed-tensors"),
    ],
)
def test_a_format_that_only_tensors_show_is_named(base, adapter, tmp_path, leaves, method):
    """As AutoGPTQ saved it, whose settings are in a file of their own."""
    for file in base.glob("*.safetensors"):
        packed = {}
        for name, tensor in load_file(file).items():
            if ".experts." not in name:
                packed[name] = tensor
                continue
            stem = name.removesuffix(".weight")
            packed |= {f"{stem}.{leaf}": torch.ones(3, 5, dtype=torch.int32) for leaf in leaves}
        save_file(packed, file)
    (base / INDEX).unlink()
    parts = (f"quantized with {method},", "unquantized", "--base FOLDER")
    refuse(base, adapter, tmp_path, UnsupportedModelError, *parts)


# Values and space


def test_float16_overflow(base, adapter, tmp_path):
    edit(
        adapter / WEIGHTS,
        lambda tensors: [t.fill_(300.0) for k, t in tensors.items() if "q_proj" in k],
    )
    with pytest.raises(NumericsError, match=r"q_proj.*float16"):
        merge_adapter(base, adapter, tmp_path / "out", dtype="float16")
    assert {p.name for p in tmp_path.iterdir()} == {"base", "adapter"}


def test_no_space(base, adapter, tmp_path, monkeypatch):
    """Free space as if 1 byte were missing; the disk itself cannot be filled in a test."""
    need = merge_adapter(base, adapter, tmp_path / "out", dry_run=True).size
    real = shutil.disk_usage(tmp_path)
    short = real._replace(free=need + output_module._OVERHEAD - 1)
    monkeypatch.setattr(output_module.shutil, "disk_usage", lambda path: short)
    refuse(
        base, adapter, tmp_path, DiskSpaceError, tmp_path, " MB are needed, but only ", " are free"
    )


def test_space_runs_out_while_writing(base, adapter, tmp_path):
    """A real limit on the size of files: the write fails as on a full disk."""
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    try:
        with pytest.raises(OSError, match="large"):
            merge_adapter(base, adapter, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
    assert {p.name for p in tmp_path.iterdir()} == {"base", "adapter"}


def test_a_check_of_some_tensors_does_not_vouch_for_the_others(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"good": torch.ones(3), "bad": torch.tensor([1.0, float("nan")])}, file)
    tensors = read_header(file, CheckpointError).tensors
    check_values([tensors["good"]], CheckpointError)
    with pytest.raises(CheckpointError, match="bad"):
        check_values(tensors.values(), CheckpointError)


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
def test_a_parent_with_nan_is_refused_unless_only_its_shapes_matter(model_type, tmp_path):
    """Dense or not: the MoE's own door looks at the values, too."""
    config = tiny.config("qwen3_moe")
    if model_type == "qwen3":
        config = AutoConfig.for_model("qwen3", **small_sizes(config))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    model.save_pretrained(tmp_path)
    check_folder(tmp_path, config, values=False)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        check_folder(tmp_path, config)


def small_sizes(config):
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "head_dim")
    return {key: getattr(config, key) for key in (*keys, "num_attention_heads")}
