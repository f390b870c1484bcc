"""``merge --format base``: the merged weights in the format that the base is stored in."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_finetune import load_model
from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.checkpoint.verify import verify_merge
from moe_finetune.cli import main
from moe_finetune.errors import NumericsError
from moe_finetune.quantization.formats import FP4
from tests import tiny_families
from tests.checkpoint import helpers
from tests.quantization.formats import BLOCK, as_fp8, as_int4, as_mxfp4, rewrite
from tests.quantization.models import batch, save

CASES = {
    "fp8": ("qwen3_moe", as_fp8),
    "fp8-moonlight": ("deepseek_v3", as_fp8),
    "int4": ("qwen3_moe", as_int4),
    "mxfp4": ("gpt_oss", as_mxfp4),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """Folders: ``stored`` (quantized), ``floats`` (what it stands for), ``adapter``, ``merged``
    (in the stored format) and ``float_merged``; and the report.
    """
    family, make = CASES[request.param]
    home = tmp_path_factory.mktemp(family)
    folders = {n: home / n for n in ("stored", "floats", "adapter", "merged", "float_merged")}
    sizes = {"intermediate_size": 64} if family == "gpt_oss" else {}
    for name in ("stored", "floats"):
        if sizes:
            tiny_families.model(family, **sizes).save_pretrained(folders[name])
        else:
            save(family, folders[name])
    if family == "gpt_oss":
        targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "q_proj.weight"]
        helpers.adapter(
            folders["floats"], folders["adapter"], target_modules=None, target_parameters=targets
        )
    else:
        helpers.adapter(folders["floats"], folders["adapter"])
    values = rewrite(folders["stored"], make)
    save_file(values, folders["floats"] / "model.safetensors", metadata={"format": "pt"})
    report = merge_adapter(folders["stored"], folders["adapter"], folders["merged"], format="base")
    merge_adapter(folders["floats"], folders["adapter"], folders["float_merged"])
    return request.param, folders, report


def floats_of(folder):
    opened = open_checkpoint(folder, stored=True)
    return {name: opened.quantized.read(name).float() for name in opened.tensors}


def digits_and_scales(kind, name, tensors):
    """Each float value's code as a number and its scale, read without the package's reader."""
    if kind.startswith("fp8"):
        weight, scale = tensors[name].float(), tensors[f"{name}_scale_inv"]
        rows, columns = (
            torch.arange(n) // size for n, size in zip(weight.shape, BLOCK, strict=True)
        )
        return weight, scale[rows][:, columns]
    stem = name.removesuffix(".weight")
    if kind == "int4":
        from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

        shape = torch.Size(tensors[f"{stem}.weight_shape"].tolist())
        digits = unpack_from_int32(tensors[f"{stem}.weight_packed"], 4, shape).float()
        scale = tensors[f"{stem}.weight_scale"]
        return digits, scale.repeat_interleave(shape[1] // scale.shape[1], 1)
    blocks, exponents = tensors[f"{name}_blocks"].long(), tensors[f"{name}_scales"].float()
    table = torch.tensor(FP4)
    digits = torch.stack([table[blocks % 16], table[blocks // 16]], -1).flatten(-2)
    scale = (2.0 ** (exponents - 127)).unsqueeze(-1).expand(digits.shape)
    return digits.flatten(-2).mT, scale.flatten(-2).mT


GRIDS = {
    "fp8": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float(),
    "int4": torch.arange(-8, 8).float(),
    "mxfp4": torch.tensor(FP4),
}


def distance(grid, value, scale):
    """From each value to the nearest code times its scale."""
    grid = grid.unique()
    above = torch.searchsorted(grid, (value / scale).contiguous()).clamp(1, len(grid) - 1)
    both = grid[torch.stack([above - 1, above])] * scale
    return (both - value).abs().amin(0)


def test_each_value_is_the_nearest_of_its_grid(case):
    """Against the format's codes on both sides, for every element of every changed tensor."""
    kind, folders, report = case
    wanted = load_file(folders["float_merged"] / "model.safetensors")
    base = load_file(folders["floats"] / "model.safetensors")
    tensors = load_file(folders["merged"] / "model.safetensors")
    old = load_file(folders["stored"] / "model.safetensors")
    grid = GRIDS[kind.partition("-")[0]]
    grid = grid[grid.isfinite()]
    changed = 0
    for name, value in wanted.items():
        if name in tensors and tensors[name].dtype == torch.float32:
            assert torch.equal(tensors[name], value), name
            continue
        if torch.equal(value, base[name]):
            continue
        changed += 1
        digits, scale = digits_and_scales(kind, name, tensors)
        nearest = distance(grid, value, scale)
        apart = (digits * scale - value).abs()
        assert (apart <= nearest + 1e-6 * scale.abs()).all(), name
        # No worse than with the scales as they were.
        _, before = digits_and_scales(kind, name, old)
        kept = distance(grid, value, before).square()
        assert apart.square().sum() <= kept.sum() * (1 + 1e-5), name
        assert kept.sum() <= (value - base[name]).square().sum() * (1 + 1e-5), name
    assert changed == report.requantized.tensors > 3


def test_figures_are_those_of_the_files(case):
    _, folders, report = case
    merged, base = floats_of(folders["merged"]), floats_of(folders["stored"])
    wanted = load_file(folders["float_merged"] / "model.safetensors")
    opened = open_checkpoint(folders["stored"], stored=True)
    error = change = weight = along = 0.0
    for name in wanted:
        delta = wanted[name].double() - base[name]
        if len(opened.quantized.stored(name)) == 1 or not delta.any():
            continue
        error += (merged[name] - wanted[name].double()).square().sum()
        change += delta.square().sum()
        weight += wanted[name].double().square().sum()
        along += (delta * (merged[name] - base[name])).sum()
    told = report.requantized
    for figure, value in [
        (told.error, (error / weight).sqrt()),
        (told.error_of_change, (error / change).sqrt()),
        (told.retained, along / change),
    ]:
        assert abs(figure - value) < 1e-4 * value
    assert 0.01 < told.error_of_change < 1


def test_logits_come_nearer_to_the_float_merge(case):
    _, folders, _ = case
    inputs = batch()["input_ids"]
    with torch.no_grad():
        wanted, found, base = (
            load_model(folders[name], dtype="float32")(inputs).logits
            for name in ("float_merged", "merged", "stored")
        )
    assert (found - wanted).norm() < 0.7 * (base - wanted).norm()


def scaled(adapter, factor, folder):
    """The adapter with its changes times ``factor``."""
    shutil.copytree(adapter, folder)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({k: v * (factor if "lora_B" in k else 1) for k, v in tensors.items()}, file)
    return folder


def test_verify_and_untouched_bytes(case, tmp_path):
    _, folders, _ = case
    report = verify_merge(folders["stored"], folders["adapter"], folders["merged"])
    assert report.tensors and report.layers is None
    merge_adapter(
        folders["stored"],
        scaled(folders["adapter"], -1.0, tmp_path / "minus"),
        tmp_path / "bad",
        format="base",
    )
    with pytest.raises(NumericsError, match=r"base \+ adapter"):
        verify_merge(folders["stored"], folders["adapter"], tmp_path / "bad")


def test_nothing_changes_with_a_weight_of_nothing(case, tmp_path):
    """Values that did not change get the bytes they had, through the whole of the arithmetic."""
    _, folders, _ = case
    report = merge_adapter(
        folders["stored"],
        scaled(folders["adapter"], 0.0, tmp_path / "none"),
        tmp_path / "same",
        format="base",
    )
    before, after = (
        load_file(folder / "model.safetensors") for folder in (folders["stored"], tmp_path / "same")
    )
    for name, tensor in before.items():
        bits = after[name].view(torch.uint8) ^ tensor.view(torch.uint8)
        # -0 + 0 is 0: the sign bit of a zero may change.
        signs = {torch.float8_e4m3fn: 0x7F, torch.uint8: 0x77}.get(tensor.dtype, 0xFF)
        assert not (bits & signs).any(), name
        if tensor.dtype == torch.float8_e4m3fn:
            assert torch.equal(after[name].float(), tensor.float()), name
    assert report.requantized.error == 0.0


def test_command(case, tmp_path, capsys):
    _, folders, _ = case
    command = ["merge", str(folders["adapter"]), "--base", str(folders["stored"])]
    assert main([*command, "--output", str(tmp_path / "no")]) == 2
    assert "merge --format base" in capsys.readouterr().err
    command += ["--format", "base", "--output"]
    assert main([*command, str(tmp_path / "no"), "--dtype", "bfloat16"]) == 2
    assert "keeps that format" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
    assert main([*command, str(tmp_path / "yes"), "--verify"]) == 0
    printed = capsys.readouterr().out
    assert "low-rank update, requantized" in printed and "of the adapter's change" in printed
    assert "changed tensors are base + adapter" in printed
    config = json.loads((tmp_path / "yes" / "config.json").read_text())
    assert config["quantization_config"]
    assert (tmp_path / "yes" / "model.safetensors").read_bytes() == (
        folders["merged"] / "model.safetensors"
    ).read_bytes()
