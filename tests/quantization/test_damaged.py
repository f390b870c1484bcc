"""Quantized checkpoints whose parts do not belong together are refused by the tensor's name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_finetune import load_model
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.errors import CheckpointError, UnsupportedModelError
from tests.quantization.formats import as_fp8, as_int4, as_mxfp4, rewrite
from tests.support import tiny, tiny_families

EXPERT = "model.layers.2.mlp.experts.5.up_proj"
"""48 x 192: two blocks of 24 rows, five of 40 columns; twelve groups of 16."""
STACK = "model.layers.1.mlp.experts.down_proj"
PARTS = {
    "fp8": {part: f"{EXPERT}.{part}" for part in ("weight", "weight_scale_inv")},
    "int4": {
        part: f"{EXPERT}.{part}" for part in ("weight_packed", "weight_scale", "weight_shape")
    },
    "mxfp4": {part: f"{STACK}_{part}" for part in ("blocks", "scales")},
}
SECTION = "quantization_config"


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Tensors and config of an undamaged checkpoint of each format."""
    checkpoints: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]] = {}
    for name, make in {"fp8": as_fp8, "int4": as_int4, "mxfp4": as_mxfp4}.items():
        folder = tmp_path_factory.mktemp(name)
        if make is as_mxfp4:
            tiny_families.model("gpt_oss", intermediate_size=64).save_pretrained(folder)
        else:
            tiny.save("qwen3_moe", folder)
        rewrite(folder, make)
        tensors = load_file(folder / "model.safetensors")
        checkpoints[name] = tensors, json.loads((folder / "config.json").read_text())
    return checkpoints


def write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    file = folder / "model.safetensors"
    save_file({n: t.contiguous() for n, t in tensors.items()}, file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def cut(tensor, rows=None, columns=None):
    return tensor[:rows, :columns]


def first(value):
    def damage(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return damage


HEADERS = {
    ("fp8", "weight_scale_inv"): {
        "scales cut to a row": (lambda t: cut(t, 1), r"\[1, 5\]; expected \[2, 5\]"),
        "scales in 8 bits": (lambda t: t.to(torch.float8_e4m3fn), "stored as F8_E4M3; fp8 needs"),
        "scales gone": (None, "is missing, which"),
    },
    ("fp8", "weight"): {
        "weight a float": (lambda t: t.float(), "stored as F32; fp8 needs F8_E4M3"),
        "weight flat": (lambda t: t.view(-1), r"\[9216\]; expected 2 dimensions"),
        "weight without a row": (lambda t: cut(t, 47), r"\[47, 192\], but config.json"),
    },
    ("int4", "weight_packed"): {
        "packed transposed": (lambda t: t.T, r"\[24, 48\], which does not pack the 48 x 192"),
        "packed as floats": (lambda t: t.view(torch.float32), "stored as F32; .* needs I32"),
    },
    ("int4", "weight_scale"): {
        "group scales cut to a row": (lambda t: cut(t, 1), r"\[1, 12\]; expected \[48, 12\]"),
        "group scales as whole numbers": (lambda t: t.long(), "stored as I64"),
    },
    ("int4", "weight_shape"): {
        "declared shape swapped": (lambda t: t.flip(0), r"pack the 192 x 48"),
        "declared shape of three": (lambda t: torch.tensor([48, 192, 1]), r"\[3\]; expected \[2\]"),
        "declared shape negative": (first(-48), r"pack the -48 x 192"),
        "declared columns no multiple": (lambda t: torch.tensor([48, 191]), "do not divide"),
    },
    ("mxfp4", "blocks"): {
        "blocks of 8 bytes": (lambda t: t.unflatten(-1, (2, 8)).flatten(2, 3), "must be 16"),
        "blocks transposed": (lambda t: t.transpose(1, 2), r"_scales' has shape .* expected"),
        "blocks as floats": (lambda t: t.float(), "stored as F32; mxfp4 needs U8"),
    },
    ("mxfp4", "scales"): {
        "exponents cut": (lambda t: t[:, :, :1], "expected"),
    },
}
CASES = {
    case: (*where, *damage) for where, cases in HEADERS.items() for case, damage in cases.items()
}


@pytest.mark.parametrize("case", CASES)
def test_parts_that_do_not_fit_are_refused_from_the_headers(case, stored, tmp_path):
    form, part, damage, words = CASES[case]
    tensors, config = stored[form]
    name, changed = PARTS[form][part], dict(tensors)
    changed.pop(name)
    if damage is not None:
        changed[name] = damage(tensors[name])
    write(tmp_path, changed, config)
    with pytest.raises(CheckpointError, match=words) as problem:
        open_checkpoint(tmp_path, stored=True)
    stem = EXPERT if form != "mxfp4" else STACK
    assert f"'{stem}" in str(problem.value)


def test_more_parts_than_the_format_has_are_refused(stored, tmp_path):
    for number, (form, name) in enumerate(
        [
            ("fp8", f"{EXPERT}.input_scale"),
            ("int4", f"{EXPERT}.weight_zero_point"),
            ("int4", f"{EXPERT}.weight_g_idx"),
            ("mxfp4", f"{STACK}_zeros"),
        ]
    ):
        tensors, config = stored[form]
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder, tensors | {name: torch.ones(3, dtype=torch.int32)}, config)
        with pytest.raises(CheckpointError, match=f"'{name}' in .* does not belong"):
            open_checkpoint(folder, stored=True)
    tensors, config = stored["int4"]
    write(tmp_path, tensors | {f"{EXPERT}.weight": torch.ones(48, 64)}, config)
    with pytest.raises(CheckpointError, match=f"'{EXPERT}.weight' is stored twice"):
        open_checkpoint(tmp_path, stored=True)


VALUES = {
    "NaN scale": ("fp8", "weight_scale_inv", first(torch.nan)),
    "infinite scale": ("fp8", "weight_scale_inv", first(torch.inf)),
    "NaN in one expert": ("fp8", "weight", first(torch.nan)),
    "NaN group scale": ("int4", "weight_scale", first(torch.nan)),
    "group scale that overflows": ("int4", "weight_scale", lambda t: t.double().fill_(1e200)),
    "exponent that means NaN": ("mxfp4", "scales", first(255)),
}


@pytest.mark.parametrize("case", VALUES)
def test_values_that_are_not_finite_are_refused(case, stored, tmp_path):
    form, part, damage = VALUES[case]
    tensors, config = stored[form]
    name = PARTS[form][part]
    write(tmp_path, tensors | {name: damage(tensors[name])}, config)
    stem = STACK if form == "mxfp4" else EXPERT
    with pytest.raises(CheckpointError, match=f"'{stem}.*contains NaN or infinity"):
        load_model(tmp_path, dtype="float32")
    with pytest.raises(CheckpointError, match=f"'{stem}.*contains NaN or infinity"):
        load_model(tmp_path, dtype="float32", quantization="nf4")


@pytest.mark.parametrize(("form", "part"), [("fp8", "weight_scale_inv"), ("int4", "weight_scale")])
def test_a_scale_that_erases_values_is_refused(form, part, stored, tmp_path):
    tensors, config = stored[form]
    name = PARTS[form][part]
    write(tmp_path, tensors | {name: first(0.0)(tensors[name])}, config)
    with pytest.raises(
        CheckpointError, match=f"'{EXPERT}.weight' has a scale of 0 for values that are not 0"
    ):
        load_model(tmp_path, dtype="float32")
    packed = next(iter(PARTS[form].values()))
    # In int4 eight digits of 8 stand for eight zeros.
    empty = torch.full_like(tensors[packed], 0 if form == "fp8" else -0x77777778)
    write(tmp_path, tensors | {name: tensors[name] * 0, packed: empty}, config)
    loaded = load_model(tmp_path, dtype="float32")
    assert not loaded.model.layers[2].mlp.experts.gate_up_proj[5, 48:].any()


def test_a_weight_too_large_for_the_dtype_is_refused(stored, tmp_path):
    tensors, config = stored["fp8"]
    name = PARTS["fp8"]["weight_scale_inv"]
    write(tmp_path, tensors | {name: tensors[name] * 1e9}, config)
    with pytest.raises(CheckpointError, match=f"'{EXPERT}.weight'.*float16.*model.dtype"):
        load_model(tmp_path, dtype="float16")


def weights(**facts):
    base = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 16}
    return {"config_groups": {"group_0": {"weights": base | facts}}}


CONFIGS = {
    "block of another size": ("fp8", {"weight_block_size": [16, 40]}, r"expected \[12, 2\]"),
    "block of zero": ("fp8", {"weight_block_size": [0, 40]}, "only scales of blocks"),
    "method of another": ("fp8", {"quant_method": "mxfp4"}, "no tensor is stored that way"),
    "group of another size": ("int4", weights(group_size=24), r"\[192, 3\]; expected \[192, 2\]"),
    "group by channel": (
        "int4",
        weights(strategy="channel", group_size=None),
        r"expected \[192, 1\]",
    ),
    "group by tensor": ("int4", weights(strategy="tensor", group_size=None), "strategy 'tensor'"),
    "8 bits": ("int4", weights(num_bits=8), "num_bits 8"),
    "with zero points": ("int4", weights(symmetric=False), "symmetric False"),
    "groups of two sizes": (
        "int4",
        {
            "config_groups": {
                name: {"weights": {"num_bits": 4, "group_size": size}}
                for name, size in (("a", 16), ("b", 32))
            }
        },
        "whose group_size differ",
    ),
    "group of another format": (
        "int4",
        {
            "config_groups": {
                "a": {"format": "int-quantized", "weights": {"num_bits": 4, "group_size": 16}}
            }
        },
        "format 'int-quantized'",
    ),
    "rotated": (
        "int4",
        {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
        "rotates",
    ),
    "another format": ("int4", {"format": "float-quantized"}, "format 'float-quantized'"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_the_parts_contradict_is_refused(case, stored, tmp_path):
    form, changes, words = CONFIGS[case]
    tensors, config = stored[form]
    write(tmp_path, tensors, config | {SECTION: config[SECTION] | changes})
    with pytest.raises((CheckpointError, UnsupportedModelError), match=words):
        open_checkpoint(tmp_path, stored=True)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=words):
        load_model(tmp_path)


def test_scales_of_a_row_and_of_other_floats_are_read(stored, tmp_path):
    tensors, config = stored["int4"]
    ones = {
        name: torch.full((len(tensor), 1), 0.5, dtype=torch.bfloat16)
        for name, tensor in tensors.items()
        if name.endswith(".weight_scale")
    }
    section = config[SECTION] | weights(strategy="channel", group_size=None)
    write(tmp_path, tensors | ones, config | {SECTION: section})
    loaded = load_model(tmp_path, dtype="float32")
    packed = tensors[f"{EXPERT}.weight_packed"]
    digits = torch.stack([(packed >> 4 * place) & 15 for place in range(8)], -1).flatten(1) - 8
    up_ERC = loaded.model.layers[2].mlp.experts.gate_up_proj
    assert torch.equal(up_ERC[5, 48:], digits * 0.5)
