"""``convert --to``: there and back the same tensors; what a form cannot hold is refused, listed."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moe_finetune.checkpoint.adapters.forms import FORMS
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.cli import main
from moe_finetune.lora.targets import add_lora
from moe_finetune.recipe.sections import LoraSection
from moe_finetune.training.run.train import continue_adapter
from tests.support.maker_formulas import (
    ALPHA,
    MAKERS,
    PROJECTIONS,
    RANK,
    WEIGHTS,
    Experts,
    logits,
    peft_config,
    save,
    tinker,
)

FAMILIES = ("qwen3_moe", "gpt_oss", "nemotron_h", "qwen3_5_moe", "gemma4", "aria")


def convert(adapter, base, form, output):
    command = ["convert", str(adapter), "--to", form, "--base", str(base), "--output", str(output)]
    assert main(command) == 0
    return output


def tensors_of(folder):
    return {k: v for k, v in load_file(folder / WEIGHTS).items() if v.numel()}


def equal(found, wanted):
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("maker", "form"), [("tinker", "shared-outer"),
                                             ("tinker, nothing shared", "stacked")])  # fmt: skip
@pytest.mark.parametrize("name", FAMILIES)
def test_stacked_to_peft_and_back(name, maker, form, dtype, tmp_path):
    """Bit for bit, with a rank of 2 r between them where gate and up have an A each."""
    write, options = MAKERS[maker]
    experts = Experts(name, base=tmp_path / "base", **options)
    tensors, config = write(experts)
    tensors = {key: value.to(dtype) for key, value in tensors.items()}
    adapter = save(tmp_path / "adapter", tensors, config)
    stacks = convert(adapter, experts.base, "peft", tmp_path / "peft")
    ranks = json.loads((stacks / "adapter_config.json").read_text())["rank_pattern"]
    assert set(ranks.values()) == ({RANK, 2 * RANK} if experts.places.gated else {RANK})
    back = convert(stacks, experts.base, form, tmp_path / "back")
    equal(tensors_of(back), tensors_of(adapter))
    written = json.loads((back / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"]) == (RANK, ALPHA)
    assert not written["rank_pattern"] and not written["alpha_pattern"]


@pytest.mark.parametrize(("maker", "form"), [("tinker", "shared-outer"),
                                             ("tinker, nothing shared", "stacked")])  # fmt: skip
def test_some_layers_there_and_back(maker, form, tmp_path):
    write, options = MAKERS[maker]
    experts = Experts("qwen3_moe", base=tmp_path / "base", **options)
    tensors, config = write(experts)
    tensors = {k: v for k, v in tensors.items() if ".layers.1." in k or ".layers.2." in k}
    adapter = save(tmp_path / "adapter", tensors, config | {"layers_to_transform": [1, 2]})
    middle = convert(adapter, experts.base, "peft", tmp_path / "peft")
    back = convert(middle, experts.base, form, tmp_path / "back")
    equal(tensors_of(back), tensors_of(adapter))
    written = json.loads((back / "adapter_config.json").read_text())
    assert written["layers_to_transform"] == [1, 2]
    again = convert(back, experts.base, "peft", tmp_path / "again")
    equal(tensors_of(again), tensors_of(middle))


def test_parts_in_different_layers_have_no_place_in_stacks(tmp_path, capsys):
    experts = Experts("qwen3_moe", base=tmp_path / "base", shared=False)
    tensors, config = per_expert(experts)
    tensors = {k: v for k, v in tensors.items() if ".experts." in k or ".layers.1." in k}
    config["target_modules"] = [k.partition(".lora_A")[0] for k in tensors if ".lora_A" in k]
    adapter = save(tmp_path / "adapter", tensors, config)
    command = ["convert", str(adapter), "--to", "stacked", "--base", str(experts.base)]
    assert main([*command, "--output", str(tmp_path / "out")]) == 2
    assert "is adapted in layers [1], other parts in" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def per_expert(experts):
    """As with transformers 4: a pair for each expert's matrix; A of gate and up are their own."""
    tensors = experts.attention_tensors()
    for (layer, role), pair in experts.factors.items():
        for side, factor in zip("AB", pair, strict=True):
            for expert, matrix in enumerate(factor):
                path = f"{experts.paths[layer]}.{expert}.{PROJECTIONS[role]}"
                tensors[f"{path}.lora_{side}.weight"] = matrix
    return tensors, peft_config(experts)


@pytest.mark.parametrize("common_a", [False, True])
def test_per_expert_to_peft_and_stacked_and_back(common_a, tmp_path):
    experts = Experts("qwen3_moe", shared=False, base=tmp_path / "base", common_a=common_a)
    adapter = save(tmp_path / "adapter", *per_expert(experts))
    for form in ("peft", "stacked"):
        between = convert(adapter, experts.base, form, tmp_path / form)
        back = convert(between, experts.base, "per-expert", tmp_path / f"from_{form}")
        equal(tensors_of(back), tensors_of(adapter))


@pytest.mark.parametrize("maker", ["megatron", "automodel"])
def test_read_only_forms_keep_their_factors(maker, tmp_path):
    """What Megatron-Bridge and Automodel saved, as PEFT's stacks and as w1, w2, w3."""
    write, options = MAKERS[maker]
    experts = Experts("qwen3_moe", base=tmp_path / "base", **options)
    adapter = save(tmp_path / "adapter", *write(experts))
    expected = save(tmp_path / "expected", *tinker(experts))
    form = "shared-outer" if options["shared"] else "stacked"
    equal(tensors_of(convert(adapter, experts.base, form, tmp_path / "out")), tensors_of(expected))


def test_factors_that_differ_are_counted(tmp_path, capsys):
    experts = Experts("qwen3_moe", shared=True, base=tmp_path / "base", common_a=True)
    tensors, config = per_expert(experts)
    for expert in range(experts.total):
        for (layer, role), (a, b) in experts.factors.items():
            path = f"{experts.paths[layer]}.{expert}.{PROJECTIONS[role]}.lora_"
            tensors[f"{path}A.weight"] = a[expert % len(a)]
            tensors[f"{path}B.weight"] = b[expert % len(b)]
    same = save(tmp_path / "same", tensors, config)
    convert(same, experts.base, "shared-outer", tmp_path / "written")
    for layer, expert in ((0, 3), (2, 9), (2, 1)):
        key = f"{experts.paths[layer]}.{expert}.down_proj.lora_B.weight"
        tensors[key] = tensors[key] * 1.5
    other = save(tmp_path / "other", tensors, config)
    command = ["convert", str(other), "--to", "shared-outer", "--base", str(experts.base)]
    assert main([*command, "--output", str(tmp_path / "refused")]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "of 80 factors, 3 of B of down differ" in shown and "convert --to stacked" in shown
    assert not (tmp_path / "refused").exists()


def test_the_list_names_each_form_and_what_is_lost(tmp_path, capsys):
    experts = Experts("qwen3_moe", shared=False, base=tmp_path / "base")
    adapter = save(tmp_path / "adapter", *tinker(experts))
    command = ["convert", str(adapter), "--base", str(experts.base)]
    assert main([*command, "--to", "list"]) == 0
    shown = capsys.readouterr().out
    heading, *lines = shown.splitlines()
    rows = {line.split()[0]: line for line in lines if line.strip()}
    column = heading.index("read by")
    assert all(line[column - 1] == " " != line[column] for line in rows.values())
    assert rows.keys() == {"peft", "per-expert", "vllm", "stacked", "shared-outer"}
    reason = "not possible: of 80 factors, 36 of A of gate and up, 36 of B of down differ"
    assert reason in rows["shared-outer"]
    assert not any("not possible" in rows[name] for name in ("peft", "per-expert", "stacked"))
    for form, part in (("stackd", "stacked"), ("automodel", "only read")):
        assert main([*command, "--to", form, "--output", str(tmp_path / "out")]) == 2
        assert part in capsys.readouterr().err
    assert main([*command, "--to", "peft"]) == 2
    assert "--output" in capsys.readouterr().err


@pytest.mark.parametrize("maker", MAKERS)
def test_training_goes_on_from_it(maker, tmp_path):
    """``lora.start``: before the first step the model computes what the maker's formula says."""
    write, options = MAKERS[maker]
    experts = Experts("qwen3_moe", base=tmp_path / "base", **options)
    adapter = save(tmp_path / "adapter", *write(experts))
    lora = LoraSection(rank=2 * RANK, alpha=4 * RANK, targets=["attention", "experts"])
    model = add_lora(Experts("qwen3_moe", base=tmp_path / "base", **options).model, lora, "frozen")
    continue_adapter(model, adapter, open_checkpoint(experts.base))
    found, wanted = logits(model.eval()), logits(experts.change_model())
    assert float((found - wanted).norm()) < 1e-4 * float(wanted.norm())


@pytest.mark.parametrize(
    ("maker", "named", "form"),
    [
        ("tinker", "Tinker", "stacked"),
        ("megatron", "Megatron-Bridge", "megatron-bridge"),
        ("automodel", "NeMo Automodel", "automodel"),
    ],
)
def test_inspect_names_maker_form_and_parts(maker, named, form, tmp_path, capsys):
    write, options = MAKERS[maker]
    experts = Experts("qwen3_moe", base=tmp_path / "base", **options)
    adapter = save(tmp_path / "adapter", *write(experts))
    assert main(["inspect", str(adapter), "--base", str(experts.base), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert named in facts["maker"] and f"({form})" in facts["form"]
    parts = {part["part"]: part for part in facts["parts"]}
    assert parts.keys() == {"attention", "routed experts"}
    assert parts["attention"]["adapted"] == 8 and parts["attention"]["ranks"] == [RANK]
    stacks = 2 * len(experts.paths)
    assert parts["routed experts"]["adapted"] == stacks
    assert parts["routed experts"]["scales"] == [ALPHA / RANK]
    assert facts["forms"]["peft"][1].startswith("nothing")
    assert main(["inspect", str(adapter), "--base", str(experts.base)]) == 0
    assert "routed experts" in capsys.readouterr().out
    for options, words in (
        ([str(adapter), "--gpu", "24"], "--gpu: of a checkpoint"),
        ([str(adapter), "--prove"], "--prove: of a checkpoint"),
        ([str(experts.base), "--base", str(experts.base)], "--base: an adapter's"),
    ):
        capsys.readouterr()
        assert main(["inspect", *options]) == 2
        assert words in capsys.readouterr().err


def test_the_table_of_the_page_names_these_programs_and_forms():
    """Each row's forms are written, its programs are among the forms', and each maker has a row."""
    page = Path("docs/adapters.md").read_text().split("## Which program reads what")[1]
    rows = [line.split("|")[1:-1] for line in page.split("\n\n")[1].splitlines()[2:]]
    cells = {program.strip(): [cell.strip() for cell in row] for program, *row in rows}
    for program, (read, written, merged, served, trained) in cells.items():
        assert read == merged == trained == "yes", program
        assert served == "after `convert`" or served.startswith(("merged", "unmerged")), program
        forms = re.findall(r"`([a-z-]+)`", written)
        assert forms and all(FORMS[form].write for form in forms), program
    readers = " ".join(form.programs for form in FORMS.values())
    for program in cells:
        assert all(name in readers for name in program.split(" and ")), program
    for maker in ("Tinker", "Megatron-Bridge", "Automodel", "Unsloth", "SGLang", "vLLM"):
        assert any(maker in program for program in cells), maker
