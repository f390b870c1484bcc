"""A merge into a base that is stored quantized: its floats + the adapter, in bfloat16."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_finetune.checkpoint.merge import merge_adapter
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.checkpoint.verify import verify_merge
from moe_finetune.cli import main
from moe_finetune.errors import CheckpointError, NumericsError
from moe_finetune.io.checkpoint_files import index_text
from tests.checkpoint import helpers
from tests.quantization.formats import as_fp8, as_int4, as_mxfp4, rewrite
from tests.quantization.models import save
from tests.support import tiny_families

CASES = {
    "fp8": ("qwen3_moe", as_fp8),
    "fp8-moonlight": ("deepseek_v3", as_fp8),
    "int4": ("qwen3_moe", as_int4),
    "mxfp4": ("gpt_oss", as_mxfp4),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """Folders: ``stored`` (quantized), ``floats`` (the values it stands for), ``adapter``,
    ``merged`` and ``float_merged``, which is the merge into ``floats``, in bfloat16.
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
    merge_adapter(folders["stored"], folders["adapter"], folders["merged"])
    merge_adapter(folders["floats"], folders["adapter"], folders["float_merged"], dtype="bfloat16")
    return folders


def test_it_is_the_merge_of_its_floats(case):
    """To the last bit where it was packed; everything else keeps the base's dtype."""
    merged = load_file(case["merged"] / "model.safetensors")
    wanted = load_file(case["float_merged"] / "model.safetensors")
    stored = load_file(case["stored"] / "model.safetensors")
    opened = open_checkpoint(case["stored"], stored=True).quantized
    assert merged.keys() == wanted.keys()
    assert 3 < sum(map(opened.is_packed, merged)) < len(merged)
    for name, value in merged.items():
        assert value.dtype == (torch.bfloat16 if opened.is_packed(name) else stored[name].dtype)
        assert torch.equal(value.to(torch.bfloat16), wanted[name].to(torch.bfloat16)), name
    config = json.loads((case["merged"] / "config.json").read_text())
    before = json.loads((case["stored"] / "config.json").read_text())
    del before["quantization_config"]
    assert config == before


def test_verify(case, tmp_path):
    report = verify_merge(case["stored"], case["adapter"], case["merged"])
    assert report.tensors and report.layers
    negated = shutil.copytree(case["adapter"], tmp_path / "minus") / "adapter_model.safetensors"
    factors = load_file(negated)
    save_file({k: -v if "lora_B" in k else v for k, v in factors.items()}, negated)
    merge_adapter(case["stored"], tmp_path / "minus", tmp_path / "bad")
    with pytest.raises(NumericsError, match=r"base \+ adapter"):
        verify_merge(case["stored"], case["adapter"], tmp_path / "bad")


@pytest.mark.parametrize("name", ["self_attn.k_proj.weight", "mlp.gate.weight"])
def test_verify_sees_a_tensor_that_no_adapter_changes(name, tmp_path):
    """Packed in the base, or not."""
    stored, merged = save("qwen3_moe", tmp_path / "qwen3_moe"), tmp_path / "merged"
    only = {"target_modules": ["q_proj"], "target_parameters": None}
    adapter = helpers.adapter(stored, tmp_path / "adapter", **only)
    rewrite(stored, as_fp8)
    merge_adapter(stored, adapter, merged)
    assert verify_merge(stored, adapter, merged).tensors
    tensors = load_file(merged / "model.safetensors")
    tensors[f"model.layers.1.{name}"].view(-1)[5] += 1
    save_file(tensors, merged / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{name}' is not changed by the adapter but"):
        verify_merge(stored, adapter, merged)


def test_parts_in_several_files(case, tmp_path):
    """A matrix goes where its packed values were; a file of scales only has no counterpart."""
    split = shutil.copytree(case["stored"], tmp_path / "split")
    tensors = load_file(split / "model.safetensors")
    (split / "model.safetensors").unlink()
    scales = {n: t for n, t in tensors.items() if n.endswith(("scale", "scale_inv", "scales"))}
    save_file(scales, split / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    rest = {n: t for n, t in tensors.items() if n not in scales}
    save_file(rest, split / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
    infos = [i for h in open_files(split) for i in h.tensors.values()]
    (split / "model.safetensors.index.json").write_text(index_text(infos))
    merge_adapter(split, case["adapter"], tmp_path / "merged")
    (file,) = (tmp_path / "merged").glob("*.safetensors")
    assert file.name == "model-00002-of-00002.safetensors"
    one = load_file(case["merged"] / "model.safetensors")
    assert all(torch.equal(value, one[name]) for name, value in load_file(file).items())
    assert verify_merge(split, case["adapter"], tmp_path / "merged").tensors


def open_files(folder):
    from moe_finetune.io.safetensors_header import read_header

    return [read_header(file, CheckpointError) for file in sorted(folder.glob("*.safetensors"))]


def test_command(case, tmp_path, capsys):
    command = ["merge", str(case["adapter"]), "--base", str(case["stored"]), "--output"]
    assert main([*command, str(tmp_path / "no"), "--format", "base"]) == 2
    assert "llm-compressor" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
    assert main([*command, str(tmp_path / "half"), "--dtype", "float32", "--dry-run"]) == 0
    assert "merged as F32 floats" in capsys.readouterr().out
    assert main([*command, str(tmp_path / "yes"), "--verify"]) == 0
    printed = capsys.readouterr().out
    assert "quantization_config is removed" in printed and "merged as BF16 floats" in printed
    assert "changed tensors are base + adapter" in printed
    assert (tmp_path / "yes" / "model.safetensors").read_bytes() == (
        case["merged"] / "model.safetensors"
    ).read_bytes()
