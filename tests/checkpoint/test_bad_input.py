"""Every defect of a checkpoint or adapter: one message with the place, and nothing written."""

from __future__ import annotations

import json
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_finetune.checkpoint import merge_adapter, open_checkpoint, write_metadata
from moe_finetune.errors import (
    AdapterError,
    CheckpointError,
    DiskSpaceError,
    NumericsError,
    UnsupportedModelError,
)
from moe_finetune.io import folder as output_module
from tests import tiny

INDEX = "model.safetensors.index.json"
WEIGHTS = "adapter_model.safetensors"
QUERY = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


@pytest.fixture
def base(tmp_path):
    """A sharded qwen3_moe checkpoint of this test's own."""
    folder = tmp_path / "base" / "qwen3_moe"
    tiny.model("qwen3_moe").save_pretrained(folder, max_shard_size="900KB")
    return folder


@pytest.fixture
def adapter(adapters, tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(adapters("qwen3_moe"), folder)
    return folder


def shard(base):
    return sorted(base.glob("*.safetensors"))[1]


def refuse(base, adapter, tmp_path, error, *parts):
    """The merge raises ``error`` whose message has all ``parts``; no file appears or changes."""
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(error) as caught:
        merge_adapter(base, adapter, tmp_path / "out")
    for part in parts:
        assert str(part) in str(caught.value)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert not (tmp_path / "out").exists()


# Checkpoints


def test_missing_folder(adapter, tmp_path):
    refuse(tmp_path / "no", adapter, tmp_path, CheckpointError, tmp_path / "no", "no such")


def test_adapter_given_as_base(adapter, tmp_path):
    refuse(adapter, adapter, tmp_path, CheckpointError, "this is an adapter")


@pytest.mark.parametrize("keep", [0, 5, 40, -1000])
def test_truncated_shard(base, adapter, tmp_path, keep):
    file = shard(base)
    file.write_bytes(file.read_bytes()[:keep])
    refuse(base, adapter, tmp_path, CheckpointError, file, "truncated")


def _header(file, change):
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    entries = json.loads(raw[8 : 8 + length])
    change(entries)
    text = json.dumps(entries).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def _first(entries):
    return next(name for name in entries if name != "__metadata__")


def _shift(entries):
    entries[_first(entries)]["data_offsets"][1] += 4


def _shape(entries):
    entries[_first(entries)]["shape"].append(2)


def _dtype(entries):
    entries[_first(entries)]["dtype"] = "F7"


def _hole(entries):
    del entries[max(entries, key=lambda n: n != "__metadata__" and entries[n]["data_offsets"][0])]


@pytest.mark.parametrize("change", [_shift, _shape, _dtype, _hole])
def test_corrupt_header(base, adapter, tmp_path, change):
    _header(shard(base), change)
    (base / INDEX).unlink()
    refuse(base, adapter, tmp_path, CheckpointError, shard(base), "corrupt")


def test_bytes_that_are_no_safetensors(base, adapter, tmp_path):
    shard(base).write_bytes(b"<html>not found</html>" * 50)
    refuse(base, adapter, tmp_path, CheckpointError, shard(base), "not a safetensors file")


def test_trailing_bytes(base, adapter, tmp_path):
    with shard(base).open("ab") as stream:
        stream.write(b"x")
    refuse(base, adapter, tmp_path, CheckpointError, shard(base), "1 bytes follow")


@pytest.mark.parametrize("with_index", [True, False])
def test_missing_shard(base, adapter, tmp_path, with_index):
    gone = shard(base)
    gone.unlink()
    if not with_index:
        (base / INDEX).unlink()
    refuse(base, adapter, tmp_path, CheckpointError, base, gone.name, "is missing")


def test_unfinished_download(base, adapter, tmp_path):
    (base / "model-00002.safetensors.incomplete").write_bytes(b"")
    refuse(base, adapter, tmp_path, CheckpointError, "model-00002.safetensors.incomplete")


def test_index_names_missing_tensor(base, adapter, tmp_path):
    index = json.loads((base / INDEX).read_text())
    index["weight_map"]["model.layers.1.mlp.extra.weight"] = shard(base).name
    (base / INDEX).write_text(json.dumps(index))
    wanted = (base / INDEX, "model.layers.1.mlp.extra.weight", shard(base).name)
    refuse(base, adapter, tmp_path, CheckpointError, *wanted)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": {"a": "../../x.safetensors"}}'])
def test_unreadable_index(base, adapter, tmp_path, content):
    (base / INDEX).write_text(content)
    refuse(base, adapter, tmp_path, CheckpointError, base / INDEX)


@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.experts.4.up_proj.weight", "model.layers.2.mlp.gate.weight"]
)
def test_missing_tensor(base, adapter, tmp_path, name):
    index = json.loads((base / INDEX).read_text())
    file = base / index["weight_map"].pop(name)
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file)
    (base / INDEX).write_text(json.dumps(index))
    refuse(base, adapter, tmp_path, CheckpointError, name, "is missing")


def test_missing_layer(base, adapter, tmp_path):
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    refuse(base, adapter, tmp_path, CheckpointError, "no tensor of layer 3")


@pytest.mark.parametrize("content", ["{", "3"])
def test_unreadable_config(base, adapter, tmp_path, content):
    (base / "config.json").write_text(content)
    refuse(base, adapter, tmp_path, CheckpointError, base / "config.json")


def test_unknown_model_type(base, adapter, tmp_path):
    (base / "config.json").write_text('{"model_type": "qwen3_mo"}')
    refuse(base, adapter, tmp_path, UnsupportedModelError, "qwen3_mo", "qwen3_moe")


def test_only_pickles(base, adapter, tmp_path):
    for file in base.glob("*.safetensors*"):
        file.unlink()
    (base / "pytorch_model.bin").write_bytes(b"x")
    refuse(base, adapter, tmp_path, CheckpointError, "pytorch_model.bin", "convert it")


def test_tensor_in_two_files(base, adapter, tmp_path):
    (base / INDEX).unlink()
    twice = shard(base)
    shutil.copy(twice, base / "extra.safetensors")
    refuse(base, adapter, tmp_path, CheckpointError, "extra.safetensors", twice.name)


def test_quantized_base(base, adapter, tmp_path):
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    file = base / json.loads((base / INDEX).read_text())["weight_map"][name]
    tensors = load_file(file)
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, file)
    refuse(base, adapter, tmp_path, CheckpointError, name, "F8_E4M3", "names no quantization")


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
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {key: section}))
    parts = (f"quantized with {method}", "unquantized", "--base FOLDER")
    refuse(base, adapter, tmp_path, UnsupportedModelError, *parts)


def test_a_format_that_can_be_read_is_named(base, adapter, tmp_path):
    config = json.loads((base / "config.json").read_text())
    section = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    parts = ("stored as fp8", "merge --format base")
    refuse(base, adapter, tmp_path, UnsupportedModelError, *parts)


@pytest.mark.parametrize(
    ("leaves", "method"),
    [
        (("qweight", "qzeros", "scales", "g_idx"), "GPTQ"),
        (("qweight", "qzeros", "scales"), "AWQ or GPTQ"),
        (("weight", "scales", "biases"), "MLX"),
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


# Adapters


def edit(adapter, change):
    tensors = load_file(adapter / WEIGHTS)
    change(tensors)
    save_file(tensors, adapter / WEIGHTS)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite(base, adapter, tmp_path, value):
    edit(adapter, lambda tensors: tensors[QUERY].view(-1)[17].fill_(value))
    name = QUERY.removeprefix("base_model.model.")
    refuse(base, adapter, tmp_path, AdapterError, adapter / WEIGHTS, name, "NaN")


def test_adapter_of_another_shape(adapter, tmp_path):
    other = tmp_path / "base" / "qwen3_moe"
    tiny.model("qwen3_moe", moe_intermediate_size=40).save_pretrained(other)
    parts = ("experts", "[96, 48]", "[80, 48]", other, "another base")
    refuse(other, adapter, tmp_path, AdapterError, *parts)


def test_adapter_of_another_family(bases, adapter, tmp_path):
    other = bases("deepseek_v2")
    refuse(other, adapter, tmp_path, AdapterError, "mlp.experts", "layer 0", other, "another base")


def test_adapter_with_more_layers(adapter, tmp_path):
    other = tmp_path / "base" / "qwen3_moe"
    tiny.model("qwen3_moe", num_hidden_layers=2).save_pretrained(other)
    refuse(other, adapter, tmp_path, AdapterError, "layers.2", other)


def test_factor_without_partner(base, adapter, tmp_path):
    edit(adapter, lambda tensors: tensors.pop(QUERY))
    refuse(base, adapter, tmp_path, AdapterError, "lora_A", "layers.1.self_attn.q_proj")


def test_rank_that_does_not_fit(base, adapter, tmp_path):
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"r": 6}))
    refuse(base, adapter, tmp_path, AdapterError, adapter, "rank 6")


def test_target_parameters_that_do_not_fit(base, adapter, tmp_path):
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["target_parameters"] = ["mlp.experts.down_proj", "gate.weight"]
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    refuse(base, adapter, tmp_path, AdapterError, "mlp.experts", "target_parameters")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"use_dora": True}, "use_dora"),
        ({"r": 0}, "'r'"),
        ({"lora_alpha": None}, "'lora_alpha'"),
    ],
)
def test_adapter_config(base, adapter, tmp_path, change, part):
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | change))
    refuse(base, adapter, tmp_path, AdapterError, adapter / "adapter_config.json", part)


def test_truncated_adapter(base, adapter, tmp_path):
    raw = (adapter / WEIGHTS).read_bytes()
    (adapter / WEIGHTS).write_bytes(raw[:-8])
    refuse(base, adapter, tmp_path, AdapterError, adapter / WEIGHTS, "truncated")


def test_pickled_adapter(base, adapter, tmp_path):
    (adapter / WEIGHTS).rename(adapter / "adapter_model.bin")
    refuse(base, adapter, tmp_path, AdapterError, WEIGHTS, "as safetensors")


def test_base_given_as_adapter(base, tmp_path):
    refuse(base, base, tmp_path, AdapterError, "adapter_config.json is missing")


@pytest.mark.parametrize(
    ("experts", "part"),
    [
        ({1: [3, 12]}, "expert 12"),
        ({1: [0, 1]}, "layers.0"),
        ({1: [4, 4]}, "moe_finetune.json"),
    ],
)
def test_selection_that_does_not_fit(base, adapter, tmp_path, experts, part):
    edit(
        adapter,
        lambda tensors: [tensors.pop(key) for key in list(tensors) if ".2.mlp.experts." in key],
    )
    if part != "layers.0":
        edit(
            adapter,
            lambda tensors: [tensors.pop(key) for key in list(tensors) if ".0.mlp.experts." in key],
        )
    write_metadata(adapter, experts=experts)
    refuse(base, adapter, tmp_path, AdapterError, part)


def test_tied_head(adapter, tmp_path):
    base = tmp_path / "base" / "qwen3_moe"
    tiny.model("qwen3_moe", tie_word_embeddings=True).save_pretrained(base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))

    def add(tensors):
        for factor, shape in (("A", (4, 192)), ("B", (400, 4))):
            tensors[f"base_model.model.lm_head.lora_{factor}.weight"] = torch.zeros(shape)

    edit(adapter, add)
    refuse(base, adapter, tmp_path, AdapterError, "lm_head", "ties")


# Values and space


def test_float16_overflow(base, adapter, tmp_path):
    edit(adapter, lambda tensors: [t.fill_(300.0) for k, t in tensors.items() if "q_proj" in k])
    with pytest.raises(NumericsError, match=r"q_proj.*float16"):
        merge_adapter(base, adapter, tmp_path / "out", dtype="float16")
    assert {p.name for p in tmp_path.iterdir()} == {"base", "adapter"}


def test_no_space(base, adapter, tmp_path, monkeypatch):
    """Free space as if 1 byte were missing; the disk itself cannot be filled in a test."""
    need = merge_adapter(base, adapter, tmp_path / "out", dry_run=True).plan.size
    real = shutil.disk_usage(tmp_path)
    short = real._replace(free=need + output_module._OVERHEAD - 1)
    monkeypatch.setattr(output_module.shutil, "disk_usage", lambda path: short)
    refuse(base, adapter, tmp_path, DiskSpaceError, tmp_path, " MB are needed and ", " are free")


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


def test_good_checkpoint_opens(base):
    """The control of this file: the same folder without a defect."""
    opened = open_checkpoint(base)
    assert opened.experts == {0: 12, 1: 12, 2: 12}
    assert opened.family.name == "qwen3_moe"
