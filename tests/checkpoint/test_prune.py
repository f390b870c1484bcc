"""Pruning copies stored bytes, whatever the layout, and refuses what no model of the class has."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_finetune import load_model
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.checkpoint.prune import prune_experts
from moe_finetune.cli import main
from moe_finetune.errors import CheckpointError, DataError
from moe_finetune.io.checkpoint_files import index_text
from moe_finetune.io.safetensors_header import read_header
from moe_finetune.lora.select import ExpertSelection
from tests.quantization.formats import as_fp8, as_int4, as_mxfp4, rewrite
from tests.quantization.models import save
from tests.support import tiny_families, tiny_heads

ROOT = Path(__file__).resolve().parents[2]


def kept_by_layer(folder, dropped=4):
    """All but some experts of each layer, others in each."""
    experts = open_checkpoint(folder, stored=True).experts
    return {
        layer: sorted((expert * 7 + layer) % total for expert in range(total - dropped))
        for layer, total in experts.items()
    }


CASES = {
    "fp8": ("qwen3_moe", as_fp8),
    "int4": ("qwen3_moe", as_int4),
    "mxfp4": ("gpt_oss", as_mxfp4),
}


def test_a_number_of_experts_next_to_the_language_part_s_changes_too(tmp_path):
    base = tmp_path / "base"
    tiny_families.model("qwen3_vl_moe").save_pretrained(base)
    config = json.loads((base / "config.json").read_text())
    total = config["text_config"]["num_local_experts"]
    config |= {"num_experts": total, "num_experts_per_tok": total}
    (base / "config.json").write_text(json.dumps(config))
    prune_experts(base, kept_by_layer(base), tmp_path / "pruned")
    written = json.loads((tmp_path / "pruned" / "config.json").read_text())
    assert written["num_experts"] == written["text_config"]["num_local_experts"] == total - 4
    assert written["num_experts_per_tok"] == total


def test_a_period_of_layers_that_equals_the_number_of_experts_stays(tmp_path):
    base, pruned = tmp_path / "base", tmp_path / "pruned"
    sizes = {"num_experts": 4, "expert_layer_period": 4, "num_experts_per_tok": 2}
    tiny_families.model("jamba", **sizes).save_pretrained(base)
    prune_experts(base, {1: [0, 2, 3], 5: [0, 1, 3]}, pruned)
    config = json.loads((pruned / "config.json").read_text())
    assert (config["num_experts"], config["expert_layer_period"]) == (3, 4)
    assert open_checkpoint(pruned).experts == {1: 3, 5: 3}


@pytest.mark.parametrize("form", CASES)
def test_quantized_experts_keep_their_stored_bytes(form, tmp_path):
    family, make = CASES[form]
    stored, floats = tmp_path / "stored", tmp_path / "floats"
    for folder in (stored, floats):
        if family == "gpt_oss":
            tiny_families.model(family, intermediate_size=64).save_pretrained(folder)
        else:
            save(family, folder)
    values = rewrite(stored, make)
    save_file(values, floats / "model.safetensors", metadata={"format": "pt"})
    kept = kept_by_layer(stored)
    prune_experts(stored, kept, tmp_path / "pruned")
    prune_experts(floats, kept, tmp_path / "of_floats")
    before, after = (load_file(f / "model.safetensors") for f in (stored, tmp_path / "pruned"))
    expected = load_file(tmp_path / "of_floats" / "model.safetensors")
    opened = open_checkpoint(tmp_path / "pruned", stored=True).quantized
    assert opened.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(opened.read(name).to(tensor.dtype), tensor), name
    if form == "mxfp4":
        name = "model.layers.1.mlp.experts.down_proj_scales"
        assert torch.equal(after[name], before[name][kept[1]])
        return
    suffix = {"fp8": "weight_scale_inv", "int4": "weight_packed"}[form]
    for new, old in enumerate(kept[1]):
        stem = "model.layers.1.mlp.experts.{}.up_proj." + suffix
        assert torch.equal(after[stem.format(new)], before[stem.format(old)])


def test_experts_that_the_quantization_names_are_renumbered(tmp_path):
    folder = save("qwen3_moe", tmp_path / "base")
    rewrite(folder, as_fp8)
    kept = {layer: [0, 2, 3, 5, 11] for layer in (0, 1, 2)}
    file = folder / "config.json"
    config = json.loads(file.read_text())
    module = "model.layers.1.mlp.experts.{}.up_proj"
    named = [module.format(4), module.format(5), "lm_head"]
    config["quantization_config"]["modules_to_not_convert"] = named
    file.write_text(json.dumps(config))
    prune_experts(folder, kept, tmp_path / "pruned")
    written = json.loads((tmp_path / "pruned" / "config.json").read_text())
    names = written["quantization_config"]["modules_to_not_convert"]
    assert names == [module.format(3), "lm_head"]
    config["quantization_config"]["modules_to_not_convert"] = [r"re:.*experts\.4\..*"]
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="unquantized"):
        prune_experts(folder, kept, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_head_that_predicts_further_tokens_is_left_out(tmp_path):
    _, head = tiny_heads.with_head("deepseek_v3", tmp_path / "base")
    kept = kept_by_layer(tmp_path / "base")
    report = prune_experts(tmp_path / "base", kept, tmp_path / "pruned")
    assert "MTP head" in report.text() and "left out" in report.text()
    tensors = load_file(tmp_path / "pruned" / "model.safetensors")
    assert not head.keys() & tensors.keys()
    config = json.loads((tmp_path / "pruned" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 0 and config["n_routed_experts"] == 8
    open_checkpoint(tmp_path / "pruned")


def test_all_else_is_copied_shard_by_shard(bases, tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    tensors = load_file(bases("olmoe") / "model.safetensors")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (base / name).write_bytes((bases("olmoe") / name).read_bytes())
    names = sorted(tensors)
    kept = kept_by_layer(bases("olmoe"))
    gone = [n for n in names if ".0.mlp.experts." in n and not _stays(n, kept)]
    rest = [name for name in names if name not in gone]
    shards = {"model-00001-of-00003.safetensors": rest[:40],
              "model-00002-of-00003.safetensors": gone,
              "model-00003-of-00003.safetensors": rest[40:]}  # fmt: skip
    for file, of_file in shards.items():
        save_file({n: tensors[n] for n in of_file}, base / file, metadata={"format": "pt"})
    headers = [read_header(file, CheckpointError) for file in sorted(base.glob("*.safetensors"))]
    infos = [info for header in headers for info in header.tensors.values()]
    (base / "model.safetensors.index.json").write_text(index_text(infos))
    prune_experts(base, kept, tmp_path / "pruned")
    files = sorted(file.name for file in (tmp_path / "pruned").glob("*.safetensors"))
    assert files == ["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"]
    pruned = {n: t for f in files for n, t in load_file(tmp_path / "pruned" / f).items()}
    for name in names:
        if "experts" not in name and "mlp.gate" not in name:
            assert torch.equal(pruned[name], tensors[name])
    assert (tmp_path / "pruned" / "tokenizer.json").read_bytes() == (
        base / "tokenizer.json"
    ).read_bytes()
    card = (tmp_path / "pruned" / "README.md").read_text()
    assert "8 of 12 experts in each of 3 layers" in card
    load_model(tmp_path / "pruned")


def _stays(name, kept):
    parts = name.split(".")
    return int(parts[parts.index("experts") + 1]) in kept[int(parts[parts.index("layers") + 1])]


def test_what_no_model_of_the_class_has_is_refused(bases, tmp_path):
    plain, grouped = bases("qwen3_moe"), tmp_path / "grouped"
    tiny_families.model("glm4_moe").save_pretrained(grouped)  # 2 groups of 5, of which 1, 3 experts
    four = [0, 3, 5, 7]
    for base, experts, words in (
        (plain, {0: four, 1: four}, "layers"),
        (plain, {0: four, 1: four, 2: [0, 1]}, "one number for all layers"),
        (plain, {0: [1, 2], 1: [0, 1], 2: [2, 3]}, "keep at least 3"),
        (plain, dict.fromkeys(range(3), (0, 1, 2, 12)), "the last one is 11"),
        (plain, dict.fromkeys(range(3), range(12)), "all experts"),
        (grouped, dict.fromkeys((1, 2, 3), (0, 1, 2, 3, 5, 6)), "equally many"),
        (grouped, dict.fromkeys((1, 2, 3), (0, 1, 5, 6)), "keep at least 3 in each"),
    ):
        with pytest.raises(DataError, match=words):
            prune_experts(base, experts, tmp_path / "pruned")
    assert [path.name for path in tmp_path.iterdir()] == ["grouped"]


def test_the_verb_keeps_the_experts_that_select_chose(bases, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": f"row {n} of {n * n}"}) + "\n" for n in range(9))
    )
    base = str(bases("deepseek_v3"))
    analyze = ["analyze", base, "--data", "rows.jsonl", "--output"]
    assert main([*analyze, "plain"]) == 0
    select = ["select", "--score", "reap", "--keep", "0.75", "--output"]
    assert main([*select, "x.json", "plain"]) == 2
    assert "--norms" in capsys.readouterr().err
    assert main([*analyze, "measured", "--norms"]) == 0
    assert main([*select, "kept.json", "measured"]) == 0
    chosen = ExpertSelection.read("kept.json")
    assert chosen.score == "reap" and chosen.keep == 0.75
    assert {len(ids) for ids in chosen.experts.values()} == {9}
    assert main([*select[:-2], "0.1", "--output", "few.json", "measured"]) == 2
    assert "a token selects 3" in " ".join(capsys.readouterr().err.split())
    prune = ["prune", base, "--experts", "kept.json", "--output", "pruned"]
    assert main([*prune, "--dry-run"]) == 0
    assert not (tmp_path / "pruned").exists()
    assert main(prune) == 0
    printed = capsys.readouterr().out
    assert "9 of 12 experts in each of 2 layers" in printed and "pruned: pruned" in printed
    assert (
        "by reap" in (tmp_path / "pruned" / "README.md").read_text()
        or "reap" in (tmp_path / "pruned" / "README.md").read_text()
    )
    # The base's selection means other experts there.
    assert main(["prune", "pruned", "--experts", "kept.json", "--output", "again"]) == 2
    assert "made for 12 experts a layer" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.faults
def test_a_pruning_that_is_killed_leaves_nothing(bases, tmp_path, warm):
    base, kept = bases("qwen3_moe"), kept_by_layer(bases("qwen3_moe"))
    for lines in (1, 20):
        output = tmp_path / f"pruned-{lines}"
        command = [sys.executable, "-m", "tests.checkpoint.pruning", str(base), str(output)]
        command.append(json.dumps(kept))
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
            for _ in range(lines):
                process.stdout.readline()
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        assert not output.exists()
        prune_experts(base, kept, output)
        assert open_checkpoint(output).experts == dict.fromkeys(kept, 8)
        assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_what_was_made_for_the_whole_base_is_refused(bases, adapters, tmp_path, capsys):
    """Numbers of experts mean others after pruning."""
    base, pruned = bases("olmoe"), tmp_path / "pruned"
    kept = kept_by_layer(base)
    prune_experts(base, kept, pruned)
    merge = ["merge", str(adapters("olmoe")), "--base", str(pruned), "--output"]
    assert main([*merge, str(tmp_path / "merged")]) == 2
    assert "prune the merged checkpoint" in capsys.readouterr().err
    # A file as ESFT published it does not say how many experts it counts.
    published = {"experts": {str(layer): [0, 1, 2] for layer in kept}}
    (tmp_path / "esft.json").write_text(json.dumps(published))
    again = ["prune", str(pruned), "--experts", str(tmp_path / "esft.json"), "--output"]
    assert main([*again, str(tmp_path / "again")]) == 2
    assert 'no "num_experts"' in capsys.readouterr().err
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "a few words here"}) + "\n")
    train = ["train", f"model.path={pruned}", f"data.train={tmp_path / 'rows.jsonl'}"]
    train += ["method=none", "lora.rank=4", f"lora.experts={tmp_path / 'esft.json'}"]
    assert main([*train, "--dry-run", "--output", str(tmp_path / "run")]) == 2
    assert 'no "num_experts"' in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["esft.json", "pruned", "rows.jsonl"]
